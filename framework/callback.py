"""Callback: the events of a run, and how they are dispatched. The order of the events is the loop:

    setup                                     everything is built, nothing is restored
    state_loaded(found)                       a checkpoint was restored
    train_start(resumed)                      once per attempt
      epoch_start(epoch)                      the first step of an epoch follows
        step_start                            before the data is fetched
        grads_ready                           gradients are complete and unscaled, not yet clipped
        step_end(output)                      the update is made and progress has advanced
      epoch_end(epoch)                        after the `step_end` of the step that completed the epoch
        eval_start · eval_end(metrics)        if an evaluation is due
        save_start(reason)                    at the safe point, if a save is due or requested
        save_committed(result)                later: the checkpoint exists now
    exception(error)                          the run failed
    train_end(status)                         finished, stopped, killed or failed
    close                                     always, once, for every callback, also if the run failed before its setup

Guarantee: only overridden events are called; starts in the order of the config, ends (`*_end`, `exception`, `close`)
in reverse. An error of a critical callback stops the run and names the callback; an observer's error is logged, and
after three it is switched off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from framework.duration import Duration
from framework.progress import Progress

if TYPE_CHECKING:
    from framework.checkpoint import Found, SaveResult
    from framework.recipe import StepOutput
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

MAX_OBSERVER_ERRORS = 3


class Callback:
    """Watches a run, keeps state of its own, and makes requests to the trainer. Subclass and override events.

    Attributes:
        critical: Whether an error of this callback stops the run; an observer's error is only logged.
        every: How often `step_end` is called: a duration, or none for every step. A time is this rank's own clock.
        name: The callback's key in the config; its state is saved under it.
        promise: What no longer holds when this callback is removed, if anything.
        records_failed_build: Whether `exception` and `close` are called, without `setup`, when model or data could not
            be built.
    """

    critical: bool = True
    promise: str = ""
    records_failed_build: bool = False
    every: str | int | None = None
    name: str = ""

    def setup(self, trainer: Trainer) -> None: ...
    def state_loaded(self, trainer: Trainer, found: Found) -> None: ...
    def train_start(self, trainer: Trainer, resumed: bool) -> None: ...
    def epoch_start(self, trainer: Trainer, epoch: int) -> None: ...
    def step_start(self, trainer: Trainer) -> None: ...
    def grads_ready(self, trainer: Trainer) -> None: ...
    def step_end(self, trainer: Trainer, output: StepOutput) -> None: ...
    def epoch_end(self, trainer: Trainer, epoch: int) -> None: ...
    def eval_start(self, trainer: Trainer) -> None: ...
    def eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None: ...
    def save_start(self, trainer: Trainer, reason: str) -> None: ...
    def save_committed(self, trainer: Trainer, result: SaveResult) -> None: ...
    def exception(self, trainer: Trainer, error: BaseException) -> None: ...
    def train_end(self, trainer: Trainer, status: str) -> None: ...
    def close(self, trainer: Trainer) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """State that is the same on all ranks: plain Python values and tensors. Collected when a save is taken."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, after `setup` and before `train_start`."""

    def rank_state_dict(self) -> dict[str, Any]:
        """State of this rank alone. Collected when a save is taken."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `rank_state_dict` gave on the same rank."""


EVENTS = (
    "setup", "state_loaded", "train_start", "epoch_start", "step_start", "grads_ready", "step_end", "epoch_end",
    "eval_start", "eval_end", "save_start", "save_committed", "exception", "train_end", "close",
)  # fmt: skip
_REVERSED = {"step_end", "epoch_end", "eval_end", "exception", "train_end", "close"}


class Events:
    """Calls the events of the callbacks of one run.

    Args:
        callbacks: Callbacks under their config names, in order. Each gets its name set.
        num_samples: Samples per epoch, for durations in epochs.
    """

    def __init__(self, callbacks: Mapping[str, Callback], num_samples: int) -> None:
        self._callbacks = dict(callbacks)
        self._num_samples = num_samples
        self._errors = dict.fromkeys(callbacks, 0)
        self._off: set[str] = set()
        for name, callback in callbacks.items():
            callback.name = name
        self._bind()

    def fire(self, event: str, *args: Any) -> None:
        """Calls one event of all callbacks that override it.

        Raises:
            Exception: A critical callback raised it; a note names the callback.
        """
        for name, call in self._calls[event]:
            try:
                call(*args)
            except Exception as error:
                self._failed(name, event, error)

    def step_end(self, trainer: Trainer, output: StepOutput, before: Progress) -> None:
        """Fires `step_end` of every callback that is due after this step."""
        for name, call, due in self._step_end:
            try:
                if due is None or due(before, trainer.progress):
                    call(trainer, output)
            except Exception as error:
                self._failed(name, "step_end", error)

    def listens(self, event: str) -> bool:
        """Whether any callback overrides an event."""
        return bool(self._calls[event])

    def close(self, trainer: Trainer) -> list[Exception]:
        """Closes every callback, whatever the others do; an observer's error is logged.

        Returns:
            The errors of critical callbacks.
        """
        errors = []
        for name, call in self._calls["close"]:
            try:
                call(trainer)
            except Exception as error:
                if self._callbacks[name].critical:
                    error.add_note(f"raised by close() of the callback '{name}'")
                    errors.append(error)
                else:
                    _log_failure(name, "close", error)
        return errors

    def plan(self) -> list[str]:
        """One line per event: who is called, in order."""
        lines = []
        for event in EVENTS:
            names = [name + self._often(name, event) for name, _ in self._calls[event]]
            if names:
                lines.append(f"{event}: {', '.join(names)}")
        return lines

    def _often(self, name: str, event: str) -> str:
        every = self._callbacks[name].every
        return f" (every {every})" if event == "step_end" and every is not None else ""

    def _bind(self) -> None:
        """Bound methods are collected once, so that an event that nobody overrides costs an empty loop."""
        self._calls: dict[str, tuple[tuple[str, Callable[..., None]], ...]] = {}
        for event in EVENTS:
            listening = [
                (name, getattr(callback, event))
                for name, callback in self._callbacks.items()
                if name not in self._off and getattr(type(callback), event) is not getattr(Callback, event)
            ]
            self._calls[event] = tuple(reversed(listening) if event in _REVERSED else listening)
        self._step_end = tuple((name, call, self._due(name)) for name, call in self._calls["step_end"])

    def _due(self, name: str) -> Callable[[Progress, Progress], bool] | None:
        every = self._callbacks[name].every
        if every is None:
            return None
        duration = Duration.parse(every, key=f"callbacks.{name}.every")
        duration.check_length(self._num_samples, key=f"callbacks.{name}.every")
        if duration.is_time:
            return _Clock(duration.value)
        return lambda before, after: duration.is_due(before, after, self._num_samples)

    def _failed(self, name: str, event: str, error: Exception) -> None:
        if self._callbacks[name].critical:
            error.add_note(f"raised by {event}() of the callback '{name}'")
            raise error
        self._errors[name] += 1
        _log_failure(name, event, error)
        if self._errors[name] >= MAX_OBSERVER_ERRORS and name not in self._off:
            log.warning("callback '%s' is switched off after %d errors; training goes on", name, self._errors[name])
            self._off.add(name)
            close = next((call for who, call in self._calls["close"] if who == name), None)
            self._bind()
            if close is not None:  # what it holds open is still released at the end
                self._calls["close"] += ((name, close),)


def _log_failure(name: str, event: str, error: Exception) -> None:
    log.warning("callback '%s' failed in %s(): %s: %s", name, event, type(error).__name__, error, exc_info=error)


class _Clock:
    """Due once a number of seconds has passed since it was last due."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def __call__(self, before: Progress, after: Progress) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
