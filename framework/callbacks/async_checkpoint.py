"""AsyncCheckpointCallback: when to save, and what to do when saving fails.

Guarantee: "saved" is said of committed checkpoints only. All ranks save the same steps. Nothing is written or swept
before a restart has found its checkpoint, and nothing is trained before the target was found to be writable. The last
save of a run, a preemption's included, is waited for; a failed one is tried again, and then ends the run with its path
and cause, or is only warned about, as configured: but never with exit code 0 if the last state was lost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.callback import Callback
from framework.callbacks import save_health, save_options, save_places
from framework.callbacks.contents import collect
from framework.callbacks.save_clock import AUTO, Auto, SaveClock
from framework.callbacks.save_health import Age, Grace, Retries, can_be_retried
from framework.checkpoint import CheckpointStore, CheckpointWriter, SaveHeader, SaveResult
from framework.checkpoint.files import words_of
from framework.checkpoint.retention import Keep
from framework.distributed import Group
from framework.duration import SECONDS, STEPS, Duration
from framework.errors import EXIT_ERROR, CheckpointError, ConfigError
from framework.loop.attempt import STOPPED
from framework.loop.remotes import parse_place, remote_store
from framework.progress import Progress

if TYPE_CHECKING:
    from framework.checkpoint.remote.tier import RemoteTier
    from framework.goodput.planning.interval import Change
    from framework.recipe import StepOutput
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

KEY = "callbacks.async_checkpoint"
STOP, WARN = "stop", "warn"
WATCH_SECONDS = 1.0


class AsyncCheckpointCallback(Callback):
    """Saves at an interval, at the end, when preempted, and on request (`touch RUN/save-now`).

    Args:
        every: Steps, epochs, or a time by rank 0's clock; `auto`: the best time, from what saves are measured to cost
            and from how often the run fails; none saves only at the end and on request.
        keep: How many checkpoints to keep, the newest ones; none keeps all. Or rules that add up, as a mapping:
            `{last: 3, every: 1000, best: 2, metric: top1, mode: max}`.
        on_failure: `stop` ends the run when a save failed and so did the tries after it, `warn` goes on.
        timeout: Longest wait for a save, and of one rank for another while saving.
        overlap: Whether the state is copied beside the next forward and backward: `on`, `off`, or `auto`: where there
            is a core to spare.
        remote: Where committed checkpoints are sent: a folder or a URL (`s3://`, `gs://`, `az://`) that all hosts see.
            Then a save counts when it is there.
        keep_local: With a remote, how many of the newest sent ones keep their local copy; none: as many as are kept.
        grace: How long the host leaves between a signal and the end; a save that takes longer is warned about. None:
            there is no such limit.
        failure_rate: For `auto`: how often a rank fails before any failure was seen, as `goodput plan --rate` takes it.
    """

    promise = "no checkpoints are written: a crash loses everything"

    def __init__(
        self,
        every: str | int | None = "10min",
        keep: int | Mapping[str, Any] | None = 3,
        on_failure: str = STOP,
        timeout: str = "10min",
        overlap: str | bool = "auto",
        remote: str | None = None,
        keep_local: int | None = None,
        grace: str | None = "30s",
        failure_rate: str | float = "llama3",
    ) -> None:
        if on_failure not in (STOP, WARN):
            raise ConfigError(f"{KEY}.on_failure={on_failure!r} must be {STOP} or {WARN}.")
        auto = Auto(failure_rate, key=f"{KEY}.failure_rate")
        self._auto = auto if every == AUTO else None
        self._interval = None if every is None or every == AUTO else Duration.parse(every, key=f"{KEY}.every")
        self._clock = SaveClock(self._interval)
        is_time = self._interval is not None and self._interval.is_time
        self._interval_in_steps = None if is_time else self._interval
        self._keep = Keep.parse(keep, key=f"{KEY}.keep")
        self._on_failure = on_failure
        self._timeout = self.timeout_seconds = Duration.parse(timeout, key=f"{KEY}.timeout", allow=(SECONDS,)).value
        self._overlap = save_options.overlap(overlap, key=f"{KEY}.overlap")
        self.remote = parse_place(remote, key=f"{KEY}.remote")
        self._keep_local = save_options.keep_local(keep_local, remote, key=KEY)
        self._grace_seconds = None if grace is None else Duration.seconds_of(grace, key=f"{KEY}.grace")
        self._retries = Retries()
        self._age = Age(None)
        self._grace = Grace(self._grace_seconds)
        self._tier: RemoteTier | None = None
        self._is_planned = False
        self._has_committed = False
        self._num_skipped = 0
        self._hangs = False
        self._is_requested = False
        self._closed = threading.Event()

    @property
    def interval(self) -> Duration | None:
        """How often it saves, if it does so by itself; none while `auto` decides."""
        return self._interval

    # -- the events of a run -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        self._num_samples = trainer.built.num_samples
        self._store = CheckpointStore(trainer.run.checkpoints)
        self._group = Group(trainer.world, timeout_seconds=self._timeout, name="checkpoint")
        if self.remote is not None:
            self._tier = remote_store(
                trainer, self.remote, group=self._group, store=self._store, keep_local=self._keep_local,
                timeout_seconds=self._timeout,
            )  # fmt: skip
        lease = trainer.lease
        self._writer = CheckpointWriter(
            self._store, trainer.world, self._group, run=trainer.name, attempt=trainer.attempt, token=trainer.token,
            is_owner=lease.is_held if lease is not None else lambda: True, timeout_seconds=self._timeout,
            keep=self._keep, remote=self._tier, overlap=self._overlap,
        )  # fmt: skip
        trainer.saver = self

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        """Only now, when a restart has found what it needs, is anything written or swept."""
        save_places.tell(trainer, self._group, self._tier)
        self._writer.prepare(collect(trainer))
        if self._tier is not None:
            self._tier.claim()
        trainer.group.on_main(lambda: self._store.sweep(trainer.attempt))
        self._clock.restart(time.monotonic())
        if trainer.world.is_main:
            self._begin_to_watch(trainer)

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if not self._is_planned:  # now the optimizer's state is there: the first save need not make room for it
            self._is_planned = True
            self._writer.prepare(collect(trainer))
        for result in self._writer.poll():
            self._finished(trainer, result)
        if trainer.world.is_main:
            self._ask(trainer, time.monotonic())

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
            CheckpointError: A save that is waited for failed, and so did the tries after it, or hangs; and the config
                says to stop.
            DistributedError: Another rank did not come.
        """
        self._clock.restart(time.monotonic())
        if wait:
            self._save_last(trainer, reason)
            return
        is_free = trainer.group.broadcast(not self._writer.busy)
        if not is_free:
            self._skip(trainer, reason)
            return
        if self._num_skipped > 1:
            log.info("%d saves were skipped while that one was written", self._num_skipped)
        self._num_skipped = 0
        self._drain(trainer, self._timeout)  # rank 0 is done; here the thread may need another moment
        self._start(trainer, reason)

    def fence(self, *, before_update: bool = False) -> None:
        """Returns when no save reads the live tensors any more."""
        self._writer.fence(before_update=before_update)

    def finish(self, trainer: Trainer) -> None:
        """Waits for the save under way, bounded.

        Raises:
            CheckpointError: It hangs, and the config says to stop.
        """
        if self._hangs:
            return
        if self._writer.busy:
            log.info("finishing the save under way")
        try:
            self._drain(trainer, self._timeout)
        except CheckpointError as error:
            if self._on_failure == STOP:
                raise
            log.error("%s", error)

    def close(self, trainer: Trainer) -> None:
        self._closed.set()
        if trainer.saver is self and not self._hangs:  # what hangs was waited for once
            self._writer.close()

    # -- what rank 0 asks for ----------------------------------------------------------------------------------------

    def _begin_to_watch(self, trainer: Trainer) -> None:
        interval = self._interval
        if interval is not None and not interval.is_time:
            steps = interval.steps(self._num_samples, trainer.settings.global_batch_size)
            interval = Duration(steps, STEPS)
        change = None if self._auto is None else self._auto.begin(trainer, time.monotonic())
        self._age = Age(interval if change is None else Duration(change.choice.seconds, SECONDS))
        self._age.begin(trainer.progress.step, time.monotonic())
        self._adopt(change)
        known = save_health.last_save_seconds(trainer.run.events, trainer.attempt)
        if known is not None:
            self._warn_of_grace(known, "the last save of the attempt before took")
        threading.Thread(target=self._watch, args=(trainer,), name="save-now", daemon=True).start()

    def _adopt(self, change: Change | None) -> None:
        """Saves at another interval from now on, if there is one."""
        if change is not None:
            self._clock.set(change.choice.seconds)
            self._age.expect(change.choice.seconds, change.inputs.persist_seconds or 0.0)

    def _ask(self, trainer: Trainer, now: float) -> None:
        """Requests what is due by the clock, or was asked for from outside; one rank asks for all."""
        if self._clock.rings(now):
            trainer.request_save("interval")
        if self._retries.is_due(now):
            trainer.request_save(f"retry of step {self._retries.step}")
        if self._is_requested:
            self._is_requested = False
            trainer.request_save("requested by save-now")
        late = self._age.late(trainer.progress.step, now)
        if late is not None:
            trainer.record("save_late", step=trainer.progress.step, message=late)
            log.warning("step %d: %s", trainer.progress.step, late)

    def _watch(self, trainer: Trainer) -> None:
        """Looks for the file that asks for a save, off the main thread: a network mount may answer late."""
        file = trainer.run.save_now_file
        while not self._closed.wait(WATCH_SECONDS):
            try:
                file.unlink()
            except OSError:
                continue
            self._is_requested = True

    # -- saving ------------------------------------------------------------------------------------------------------

    def _skip(self, trainer: Trainer, reason: str) -> None:
        self._num_skipped += 1
        trainer.record("save_skipped", step=trainer.progress.step, reason=reason)
        if self._num_skipped == 1:
            log.info("step %d: not saved, the save before it is still being written", trainer.progress.step)

    def _start(self, trainer: Trainer, reason: str) -> None:
        trainer.record("save_start", step=trainer.progress.step, reason=reason)
        self._writer.start(collect(trainer), self._header(trainer, reason))

    def _drain(self, trainer: Trainer, timeout: float) -> list[SaveResult]:
        try:
            results = self._writer.wait(timeout)
        except CheckpointError as error:
            self._hangs = True
            who = self._group.missing()  # it may be just this bound after which the others would have been named
            raise CheckpointError(f"{error} Of the others {who}." if who else str(error)) from error
        for result in results:
            self._finished(trainer, result)
        return results

    def _save_last(self, trainer: Trainer, reason: str) -> None:
        """Saves the state with which the run ends; the exit code tells if that did not work."""
        step = trainer.progress.step
        try:
            error = self._save_and_wait(trainer, reason)
        except CheckpointError as problem:
            error = str(problem)
        if error is None:
            return
        message = f"step {step} could not be saved: {error}"
        if self._on_failure == STOP:
            raise CheckpointError(message)
        log.error("%s. A restart goes on from the checkpoint before it.", message)
        trainer.stop.exit_code = EXIT_ERROR
        trainer.stop.stop = trainer.stop.stop or message

    def _save_and_wait(self, trainer: Trainer, reason: str) -> str | None:
        """Saves until it works or is not worth another try; the error of the last try, the same on all ranks.

        Raises:
            CheckpointError: A save hangs.
        """
        began = time.monotonic()
        is_preempted = trainer.stop.exit_code > EXIT_ERROR
        patience = min(self._timeout, self._grace.seconds) if is_preempted else self._timeout
        if self._writer.busy:
            log.info("step %d: finishing the save under way", trainer.progress.step)
        self._drain(trainer, self._timeout)
        log.info("step %d: saving, then the run ends", trainer.progress.step)
        error = self._try(trainer, reason, self._timeout)
        for delay in save_health.RETRY_SECONDS:
            passed = time.monotonic() - began
            is_worth_it = error is not None and can_be_retried(error) and passed + delay < patience
            if not trainer.group.broadcast(is_worth_it):  # by rank 0's clock
                break
            time.sleep(delay)
            error = self._try(trainer, f"retry of step {trainer.progress.step}", max(1.0, self._timeout - passed))
        return error

    def _try(self, trainer: Trainer, reason: str, timeout: float) -> str | None:
        """Saves and waits for it; or sends what is saved here already, if that alone failed. Returns rank 0's error."""
        tier, step = self._tier, trainer.progress.step
        is_here = tier is not None and tier.pending is not None and tier.pending.step == step
        uploaded = tier.push_again() if tier is not None and trainer.group.broadcast(is_here) else None
        if uploaded is not None:
            self._finished(trainer, uploaded)
            return trainer.group.broadcast(uploaded.error)
        self._start(trainer, reason)
        results = self._drain(trainer, timeout)
        return trainer.group.broadcast(results[-1].error if results else "there was no answer")

    def _finished(self, trainer: Trainer, result: SaveResult) -> None:
        """A save ended; the same result on all ranks, though maybe not at the same step."""
        if not result.committed:
            self._failed(trainer, result)
            return
        self._retries.succeeded()
        trainer.record(
            "save_committed", durable=True, step=result.step, path=str(result.path.relative_to(trainer.run.path)),
            bytes=result.bytes, stall_seconds=result.stall_seconds, persist_seconds=result.persist_seconds,
            upload_seconds=result.upload_seconds, tier=result.tier, captured=result.captured,
            interval_seconds=self._clock.seconds if math.isfinite(self._clock.seconds) else None,
        )  # fmt: skip
        if trainer.world.is_main:
            if not self._has_committed:
                self._warn_of_metric(trainer)
            self._has_committed = True
            seconds_ago = max(0.0, time.time() - result.captured)
            self._age.committed(result.step, seconds_ago, time.monotonic())
            if self._auto is not None:
                self._adopt(self._auto.committed(trainer, result, time.monotonic()))
            self._warn_of_grace(result.stall_seconds + result.persist_seconds, "the last save took")
        log.info("step %d: saved, %s in %.2f s", result.step, words_of(result.bytes), result.persist_seconds)
        trainer.events.fire("save_committed", trainer, result)

    def _failed(self, trainer: Trainer, result: SaveResult) -> None:
        error = result.error or "no cause was given"
        trainer.record(
            "save_failed", durable=True, step=result.step, path=str(result.path), error=error, local=result.local
        )
        log.warning("step %d: not saved in %s: %s", result.step, result.path, error)
        if not trainer.world.is_main:
            return  # one rank asks for all
        if self._retries.failed(result.step, error, time.monotonic()) is None:
            if self._on_failure == STOP:
                trainer.request_stop(f"saving failed in {result.path}: {error}", EXIT_ERROR)
            else:
                log.warning("saving is given up until the next one is due; training goes on (%s.on_failure=warn)", KEY)

    def _warn_of_grace(self, seconds: float, source: str) -> None:
        message = self._grace.takes(seconds, source)
        if message is not None:
            log.warning("%s.", message)

    def _warn_of_metric(self, trainer: Trainer) -> None:
        message = save_health.never_best(self._keep, trainer.built.evaluation is not None or bool(trainer.last_metrics))
        if message is not None:
            log.warning("%s", message)

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
