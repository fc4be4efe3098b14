"""Trainer: the step loop, the only place where progress advances.

Guarantee: a step is whole or did not happen. A checkpoint is taken at one safe point, after the update, the callbacks
and the evaluation of a step, so that resuming is "load, then go on". Nothing is created on disk before everything is
built.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from framework import distributed
from framework.callback import Callback, Events
from framework.checkpoint.remote import RemoteTier
from framework.data import position
from framework.data.device import to_device
from framework.data.receipt import Receipt
from framework.distributed import Group, World
from framework.duration import EPOCHS, STEPS, Duration
from framework.errors import EXIT_DONE, BuildError, CheckpointError
from framework.goodput.accounts.results import Goodput
from framework.journal import Journal
from framework.loop import attempt, explain, loading
from framework.loop.assembly import Assembly, build
from framework.loop.control import Control, Requests
from framework.loop.due import Due
from framework.loop.evaluation import evaluate, evaluate_if_due
from framework.loop.meter import CHECKPOINT, DATA_WAIT, PRODUCTIVE, Meter
from framework.loop.slots import Restorer, Saver
from framework.loop.update import Skip
from framework.progress import Progress
from framework.recipe import Recipe
from framework.rundir import Lease, RunDirectory
from framework.settings import LoaderSettings, ParallelSettings, RunSettings, TrainerSettings

log = logging.getLogger(__name__)


class Trainer:
    """Trains a recipe, and can be killed and started again at any moment.

    Args:
        recipe: What to train.
        callbacks: Callbacks under their names, in order.
        trainer: How long and how to train.
        loader: How samples get to the model.
        run: Which run this is.
        parallel: How the model is spread over ranks.
        seed: Seed of everything random.
        config: The resolved config, kept beside the run; any plain mapping.
        recipe_name: The run's name if `run.name` is not set.

    Attributes:
        progress: What is done.
        built: Model, optimizers, data and what drives them; after `fit` has built them.
        saver: Who saves, if anybody.
        restorer: Who restores, if anybody.
        remote: Where else checkpoints are kept, if anywhere.
        meter: Who measures time.
        goodput: The account of all attempts up to now, if one is kept; given how many seconds it may wait for the newest.
        before_first_step: Called in order right before the first step: generators are restored here, last of all.
        skip_listeners: Called with each step whose update was left out.
        batch_listeners: Called with each step and the receipts of its batches, as far as the loader wants receipts.
        restores_position: Whether somebody restores the place in the data.
        last_metrics: Results of the newest evaluation.
    """

    def __init__(
        self,
        recipe: Recipe,
        callbacks: Mapping[str, Callback] | None = None,
        *,
        trainer: TrainerSettings | None = None,
        loader: LoaderSettings | None = None,
        run: RunSettings | None = None,
        parallel: ParallelSettings | None = None,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        recipe_name: str = "run",
    ) -> None:
        self.recipe = recipe
        self.callbacks = dict(callbacks or {})
        settings = self.settings = trainer or TrainerSettings()
        self.loader_settings = loader or LoaderSettings()
        self.run_settings = run or RunSettings()
        self.parallel_settings = parallel or ParallelSettings()
        self.seed = seed
        self.config = dict(config or {})
        self.name = self.run_settings.name or recipe_name
        self.run = RunDirectory(self.run_settings.dir or Path(self.run_settings.root) / self.name)
        self.progress = Progress()
        self.saver: Saver | None = None
        self.restorer: Restorer | None = None
        self.remote: RemoteTier | None = None
        self.meter = Meter()
        self.goodput: Callable[[float], Goodput | None] = lambda _: None
        self.before_first_step: list[Callable[[], None]] = []
        self.skip_listeners: list[Callable[[Skip], None]] = []
        self.batch_listeners: list[Callable[[int, list[Receipt]], None]] = []
        self.restores_position = self.pending_evaluation = False
        self.last_metrics: dict[str, float] = {}
        self.stop = Requests()
        self.attempt, self.token, self.elapsed_before = 0, "", 0.0
        self.lease: Lease | None = None
        self.journal: Journal | None = None
        self._recent: deque[tuple[int, int]] = deque(maxlen=64)
        self.eval_every = Duration.optional(settings.eval_every, key="trainer.eval_every", allow=(STEPS, EPOCHS))
        self.max_time = Duration.seconds_of(settings.max_time, key="trainer.max_time")
        self._timeout = Duration.seconds_of(settings.timeout, key="trainer.timeout") or 600.0

    # -- the life of a run -------------------------------------------------------------------------------------------

    def fit(self) -> int:
        """Trains until the budget is used up or somebody stops the run; returns the exit code.

        A run that is finished already is left as it is; the model then has the weights of its last checkpoint.

        Raises:
            FrameworkError: The settings, the data or the directory do not allow it, or the run failed on purpose.
        """
        self._join()
        try:
            self.group.on_main(lambda: attempt.check_directory(self))
            self._build()
            if attempt.is_finished(self):
                return EXIT_DONE
            return self._run()
        finally:
            distributed.leave()

    def _run(self) -> int:
        attempt.open_run(self)  # from here on things are created on disk
        self.log = attempt.open_log(self)
        status = "failed"
        try:
            self._start()
            is_over = self._is_over()
            while not is_over:
                before = self.progress
                self._step()
                is_over = self._safe_point(before)
            status = attempt.status_of(self.stop)
        except BaseException as error:
            status = attempt.record_failure(self, error)
            raise
        finally:
            attempt.close_run(self, status)
        return self.stop.exit_code

    def _step(self) -> None:
        before, built = self.progress, self.built
        if self._listens_to_starts:
            self.events.fire("step_start", self)
        batches = [next(self._batches) for _ in self._window]
        if self._moves_batches:
            batches = [to_device(batch, self.world.device, self.settings.channels_last) for batch in batches]
        self.meter.lap(DATA_WAIT)
        step = before.step + 1
        output = built.compute(step, batches)
        if self.saver is not None:
            self.saver.fence(before_update=True)
        skipped = built.update.apply(step, output, self._grads_ready)
        if built.parts.ema is not None:
            built.parts.ema.update()
        rate = built.learning_rate.current
        built.learning_rate.advance(step)
        self._advance(before)
        receipts = built.loader.commit(built.accumulation)
        for listener in self.batch_listeners:
            listener(step, receipts)
        self.log.add(output.loss, rate, output.metrics)
        if skipped:
            self._skipped(skipped)
        self.events.step_end(self, output, before)

    def _safe_point(self, before: Progress) -> bool:
        """Evaluation, save and stop, in this order; the only place where a checkpoint is taken.

        Returns:
            Whether the run is over.
        """
        after = self.progress
        if after.epoch > before.epoch:
            self._epochs(before.epoch, after.epoch)
        if self.max_time is not None and self.world.is_main and self.is_out_of_time:
            self.control.stop("time budget used up")
        requests = self.control.agreed(after.step)
        if requests is not None and requests.stop:
            self.stop = requests
        evaluate_if_due(self, before, requests)
        is_last = self._is_over()
        reason = self._due.reason(self, before, requests, is_last)
        if reason:
            self._save(reason, wait=is_last)
        self.meter.lap(PRODUCTIVE)
        self.log.end_step(self.meter)
        if requests is not None and requests.rollback and not is_last:
            self._roll_back(requests.rollback)
        return is_last

    # -- requests ----------------------------------------------------------------------------------------------------

    def request_stop(self, reason: str, exit_code: int = EXIT_DONE) -> None:
        """Asks to stop after the current step, with a checkpoint of it."""
        self.control.stop(reason, exit_code)

    def request_save(self, reason: str) -> None:
        """Asks for a checkpoint after the current step."""
        self.control.save(reason)

    def request_eval(self, reason: str) -> None:
        """Asks for an evaluation after the current step."""
        self.control.eval(reason)

    def request_rollback(self, reason: str) -> None:
        """Asks to go back to the newest checkpoint after the current step."""
        self.control.rollback(reason)

    def fence(self) -> None:
        """Returns when no save reads the live tensors any more. Call it before changing them by hand."""
        if self.saver is not None:
            self.saver.fence()

    # -- what callbacks use ------------------------------------------------------------------------------------------

    @property
    def elapsed_seconds(self) -> float:
        """Training time over all attempts, as far as it led to the present state."""
        return self.elapsed_before + time.monotonic() - self._started

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time budget, if there is one, is used up by this rank's clock."""
        return self.max_time is not None and self.elapsed_seconds >= self.max_time

    @property
    def root(self) -> Path:
        """The folder that holds the run directory."""
        return self.run.path.parent

    def record(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """Writes an event to the run's journal; ranks other than 0 write nothing."""
        if self.journal is not None and self.world.is_main:
            self.journal.event(event, durable=durable, **fields)

    def ids_of(self, step: int) -> list[int]:
        """Ids of the samples of a recent step; empty if it is not recent."""
        start = dict(self._recent).get(step)
        return [] if start is None else self.built.loader.ids(start).tolist()

    def allows(self, difference: str) -> bool:
        """Whether `run.allow` permits a difference from the checkpoint."""
        return difference in self.run_settings.allow

    def explain(self, notes: Sequence[str] = ()) -> str:
        """What would run, in what order, and whether a resume would be exact. Builds everything, creates nothing.

        Args:
            notes: What is known to be not exact beside what the trainer finds.
        """
        with self._built_only():
            return explain.describe(self, notes)

    def validate(self) -> list[str]:
        """Builds everything and creates nothing; returns notes about what is not exact.

        Raises:
            FrameworkError: Something is wrong.
        """
        with self._built_only():
            self.group.on_main(lambda: attempt.check_directory(self))
            return explain.notes(self)

    @contextmanager
    def _built_only(self) -> Iterator[None]:
        self._join()
        try:
            self._build()
            yield
        finally:
            distributed.leave()

    def _join(self) -> None:
        self.world: World = distributed.join(self.settings.device, self._timeout)
        self.group = Group(self.world, timeout_seconds=self._timeout, name="trainer")
        self.control = Control(Group(self.world, timeout_seconds=self._timeout, name="control"))

    def _build(self) -> None:
        try:
            done = self.group.on_main(lambda: attempt.done_before(self))
            self.built: Assembly = build(
                self.recipe, self.settings, self.loader_settings, self.seed, self.world, done,
                self.group.all_gather, lambda dataset: loading.adopt_saved(self, dataset),
            )  # fmt: skip
            loading.check_saves(self.callbacks, self.built.data, self.settings.global_batch_size)
        except BuildError as error:
            attempt.record_failed_build(self, error)
            raise
        self.events = Events(self.callbacks, self.built.num_samples)
        self.total_steps = self.built.total_steps
        self._due = Due(self.built.strategy)
        self._moves_batches = self.world.device.type == "cpu" and self.settings.channels_last
        listens = self.events.listens
        self._listens_to_starts = listens("step_start")
        self._grads_ready = (lambda: self.events.fire("grads_ready", self)) if listens("grads_ready") else None
        self._window = range(self.built.accumulation)

    def _start(self) -> None:
        self._started = time.monotonic()
        self.events.fire("setup", self)
        found = self.restorer.restore(self) if self.restorer is not None else None
        if found is None:
            attempt.begin_fresh(self)
        else:
            self.events.fire("state_loaded", self, found)
        self._continue()
        self.record(
            "train_start", step=self.progress.step, total_steps=self.total_steps, num_samples=self.built.data.known_samples,
            global_batch_size=self.settings.global_batch_size, resumed=found is not None,
        )  # fmt: skip
        self.events.fire("train_start", self, found is not None)
        self.events.fire("epoch_start", self, self.progress.epoch)
        is_pending = self.pending_evaluation
        if is_pending and self.built.evaluation is not None:
            evaluate(self, self.built.evaluation)
        for restore in self.before_first_step:
            restore()
        if is_pending and not self.pending_evaluation and self._is_over():  # it was all that was missing at the end
            self._save("end", wait=True)

    def _continue(self) -> None:
        """Goes on from `progress`: data, learning rate, log and clock are put there."""
        self.built.loader.seek(self.progress.position)
        self._batches = loading.on_device(iter(self.built.loader), self.world, self.settings.channels_last)
        self.built.learning_rate.prepare(self.progress.step)
        self.log.begin(self.progress.step)
        self.meter.begin()

    def _is_over(self) -> bool:
        if self.stop.stop:
            return True
        step, total = self.progress.step, self.total_steps
        if step == 0 and self.world.size == 1 and self.control.stop_requested_here:
            self.stop = self.control.agreed(0) or self.stop
            return True
        return total is not None and step >= total

    def _advance(self, before: Progress) -> None:
        built = self.built
        end = position.advance(
            before.position, self.settings.global_batch_size, built.num_samples, self.loader_settings.epoch_end
        )
        self.progress = before.advance(end, end // built.num_samples)
        self._recent.append((before.step + 1, before.position))

    def _skipped(self, skipped: list[Skip]) -> None:
        self.progress = self.progress.with_skipped(len(skipped))
        for skip in skipped:
            self.log.skipped(skip.step)
            for listener in self.skip_listeners:
                listener(skip)

    def _epochs(self, before: int, after: int) -> None:
        for epoch in range(before, after):
            self.events.fire("epoch_end", self, epoch)
            if not self._is_over():
                self.events.fire("epoch_start", self, epoch + 1)

    def _save(self, reason: str, wait: bool) -> None:
        if self.saver is None:
            return
        self.meter.lap(PRODUCTIVE)
        learned = self.built.update.learned(wait=True)
        if learned:
            self._skipped(learned)
        self.log.flush(self.meter)
        self.events.fire("save_start", self, reason)
        self.saver.save(self, reason, wait)
        self.meter.lap(CHECKPOINT)

    def _roll_back(self, reason: str) -> None:
        log.warning("step %d: going back to the newest checkpoint: %s", self.progress.step, reason)
        self.log.flush(self.meter)
        if self.saver is not None:
            self.saver.finish(self)
        left = self.progress.step
        found = self.restorer.restore(self) if self.restorer is not None else None
        if found is None:
            raise CheckpointError(f"step {left}: cannot go back, there is no checkpoint yet ({reason}).")
        self.events.fire("state_loaded", self, found)
        self.record("rollback", step=left, to=self.progress.step, reason=reason)
        self._continue()
        for restore in self.before_first_step:
            restore()
