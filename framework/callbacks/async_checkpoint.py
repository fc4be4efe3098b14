"""AsyncCheckpointCallback: when to save, and what to do when saving fails.

Guarantee: "saved" is said of committed checkpoints only. All ranks save the same steps. The last save of a run, a
preemption's included, is waited for; a failed one is retried, and then ends the run with its path and cause, or is
only warned about, as configured.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from framework.callback import Callback
from framework.callbacks.contents import collect
from framework.checkpoint import CheckpointStore, CheckpointWriter, SaveHeader, SaveResult
from framework.checkpoint.retention import Keep
from framework.distributed import Group
from framework.duration import SECONDS, Duration
from framework.errors import EXIT_ERROR, CheckpointError, ConfigError
from framework.loop.attempt import STOPPED
from framework.progress import Progress

if TYPE_CHECKING:
    from framework.recipe import StepOutput
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

STOP, WARN = "stop", "warn"
WATCH_SECONDS = 1.0


class AsyncCheckpointCallback(Callback):
    """Saves at an interval, at the end, when preempted, and on request (`touch RUN/save-now`).

    Args:
        every: Steps, epochs, or a time by rank 0's clock; none saves only at the end and on request.
        keep: How many checkpoints to keep, the newest ones; none keeps all.
        on_failure: `stop` ends the run when a save failed twice, `warn` goes on.
        timeout: Longest wait for a save, and of one rank for another while saving.
    """

    promise = "no checkpoints are written: a crash loses everything"

    def __init__(
        self, every: str | int | None = "10min", keep: int | None = 3, on_failure: str = STOP, timeout: str = "10min"
    ) -> None:
        key = "callbacks.async_checkpoint"
        if every == "auto":
            raise ConfigError(f"{key}.every=auto is not available in this version. Give steps, epochs or a time.")
        if on_failure not in (STOP, WARN):
            raise ConfigError(f"{key}.on_failure={on_failure!r} must be {STOP} or {WARN}.")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            problem = "would delete every checkpoint" if isinstance(keep, int) else "is no whole number"
            raise ConfigError(f"{key}.keep={keep!r} {problem}. Give 1 or more, or null to keep all.")
        self._interval = Duration.parse(every, key=f"{key}.every") if every is not None else None
        is_time = self._interval is not None and self._interval.is_time
        self._interval_in_steps = None if is_time else self._interval
        self._keep = keep
        self._on_failure = on_failure
        self._timeout = Duration.parse(timeout, key=f"{key}.timeout", allow=(SECONDS,)).value
        self._failures = 0
        self._is_planned = False
        self._next_save = float("inf")
        self._is_requested = False
        self._closed = threading.Event()

    def setup(self, trainer: Trainer) -> None:
        self._num_samples = trainer.built.num_samples
        self._store = CheckpointStore(trainer.run.checkpoints)
        group = Group(trainer.world, timeout_seconds=self._timeout, name="checkpoint")
        lease = trainer.lease
        self._writer = CheckpointWriter(
            self._store, trainer.world, group, run=trainer.name, attempt=trainer.attempt,
            token=trainer.token, is_owner=lease.is_held if lease is not None else lambda: True,
            timeout_seconds=self._timeout, keep=None if self._keep is None else Keep(last=self._keep),
        )  # fmt: skip
        self._writer.prepare(collect(trainer))
        if trainer.world.is_main:
            self._store.sweep(trainer.attempt)
            threading.Thread(target=self._watch, args=(trainer,), name="save-now", daemon=True).start()
        trainer.saver = self

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        self._restart_clock()

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if not self._is_planned:  # now the optimizer's state is there: the first save need not make room for it
            self._is_planned = True
            self._writer.prepare(collect(trainer))
        for result in self._writer.poll():
            self._finished(trainer, result)
        if time.monotonic() >= self._next_save and trainer.world.is_main:
            trainer.request_save("interval")
            self._next_save = float("inf")  # set anew when the request comes back as agreed
        if self._is_requested:
            self._is_requested = False
            trainer.request_save("requested by save-now")

    def is_due(self, before: Progress, after: Progress) -> bool:
        """Whether the interval, given in steps or epochs, is over."""
        interval = self._interval_in_steps
        return interval is not None and interval.is_due(before, after, self._num_samples)

    def save(self, trainer: Trainer, reason: str, wait: bool) -> None:
        """Starts a save of the current step, or skips it while another is under way.

        Args:
            trainer: At its safe point; all ranks are.
            reason: Why.
            wait: Whether nothing may go on before the checkpoint is committed; then nothing is skipped.

        Raises:
            CheckpointError: A save that is waited for failed twice, and the config says to stop.
        """
        self._restart_clock()
        if wait:
            self._save_and_wait(trainer, reason)
            return
        is_free = trainer.group.broadcast(not self._writer.busy)
        if not is_free:
            trainer.record("save_skipped", step=trainer.progress.step, reason=reason)
            log.info("step %d: not saved, the save before it is still being written", trainer.progress.step)
            return
        self._drain(trainer)  # rank 0 is done; here the thread may need another moment
        self._start(trainer, reason)

    def fence(self) -> None:
        """Returns when no save reads the live tensors any more."""
        self._writer.fence()

    def finish(self, trainer: Trainer) -> None:
        """Waits for the save under way, bounded."""
        if self._writer.busy:
            log.info("finishing the save under way")
        self._drain(trainer)

    def close(self, trainer: Trainer) -> None:
        self._closed.set()
        if trainer.saver is self:
            self._writer.close()

    def _save_and_wait(self, trainer: Trainer, reason: str) -> None:
        if self._writer.busy:
            log.info("step %d: finishing the save under way", trainer.progress.step)
        self._drain(trainer)
        log.info("step %d: saving, then the run ends", trainer.progress.step)
        for attempt in (1, 2):
            self._start(trainer, reason)
            results = self._drain(trainer)
            if results and results[-1].committed:
                return
            error = results[-1].error if results else f"no answer within {self._timeout:g} s"
            if attempt == 2 and self._on_failure == STOP:
                raise CheckpointError(f"step {trainer.progress.step} could not be saved: {error}")

    def _start(self, trainer: Trainer, reason: str) -> None:
        trainer.record("save_start", step=trainer.progress.step, reason=reason)
        self._writer.start(collect(trainer), self._header(trainer, reason))

    def _drain(self, trainer: Trainer) -> list[SaveResult]:
        results = self._writer.wait(self._timeout)
        for result in results:
            self._finished(trainer, result)
        return results

    def _finished(self, trainer: Trainer, result: SaveResult) -> None:
        """A save ended; the same result on all ranks, though maybe not at the same step."""
        if result.committed:
            self._failures = 0
            trainer.record(
                "save_committed", durable=True, step=result.step, path=str(result.path.relative_to(trainer.run.path)),
                bytes=result.bytes, stall_seconds=result.stall_seconds, persist_seconds=result.persist_seconds,
                captured=result.captured,
            )  # fmt: skip
            log.info("step %d: saved, %.1f MB in %.2f s", result.step, result.bytes / 1e6, result.persist_seconds)
            trainer.events.fire("save_committed", trainer, result)
            return
        self._failures += 1
        trainer.record("save_failed", durable=True, step=result.step, path=str(result.path), error=result.error)
        log.warning("step %d: not saved in %s: %s", result.step, result.path, result.error)
        if self._failures == 1:
            trainer.request_save(f"retry of step {result.step}")
        elif self._on_failure == STOP:
            trainer.request_stop(f"saving failed in {result.path}: {result.error}", EXIT_ERROR)

    def _header(self, trainer: Trainer, reason: str) -> SaveHeader:
        progress, stop = trainer.progress, trainer.stop
        finished = None
        is_complete = not trainer.pending_evaluation
        if is_complete and trainer.total_steps is not None and progress.step >= trainer.total_steps:
            finished = "budget used up"
        elif is_complete and stop.stop and stop.exit_code == 0:
            finished = f"{STOPPED}{stop.stop}" if not trainer.is_out_of_time else stop.stop
        return SaveHeader(
            step=progress.step, position=progress.position, epoch=progress.epoch, skipped=progress.skipped,
            reason=reason, metrics=trainer.last_metrics, finished=finished, elapsed_seconds=trainer.elapsed_seconds,
            extra={"pending_evaluation": trainer.pending_evaluation},
        )  # fmt: skip

    def _restart_clock(self) -> None:
        if self._interval is not None and self._interval.is_time:
            self._next_save = time.monotonic() + self._interval.value

    def _watch(self, trainer: Trainer) -> None:
        """Looks for the file that asks for a save, off the main thread: a network mount may answer late."""
        file = trainer.run.save_now_file
        while not self._closed.wait(WATCH_SECONDS):
            try:
                file.unlink()
            except OSError:
                continue
            self._is_requested = True
