"""When the next save is due by the clock, and `every=auto`, which sets that clock by what was measured.

Guarantee: one rank's clock decides for all. An interval that changes counts from the last save on, and is told: in the
log, and in the journal with everything it depends on, from which the next attempt goes on.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from framework.duration import Duration
from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.checkpoint import SaveResult
    from framework.goodput.planning.interval import AutoInterval, Change
    from framework.goodput.planning.rates import Rate
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

AUTO = "auto"


class SaveClock:
    """Tells rank 0 when to ask for a save.

    Args:
        every: The interval, if it is a time; else the clock never rings.
    """

    def __init__(self, every: Duration | None) -> None:
        self._seconds = every.value if every is not None and every.is_time else math.inf
        self._since = math.inf
        self._has_rung = False

    @property
    def seconds(self) -> float:
        """The interval; infinite if there is none."""
        return self._seconds

    def set(self, seconds: float) -> None:
        """Another interval, from the last save on."""
        self._seconds = seconds

    def restart(self, now: float) -> None:
        """A save begins, or training does."""
        self._since = now
        self._has_rung = False

    def rings(self, now: float) -> bool:
        """Whether it is time; true once until it is started anew, when the request comes back as agreed."""
        if self._has_rung or now - self._since < self._seconds:
            return False
        self._has_rung = True
        return True


class Auto:
    """`every=auto` on rank 0.

    Args:
        failure_rate: What is believed of failures before any was seen, as users write it.
        key: The config key it stands under.

    Raises:
        ConfigError: It is none.
    """

    def __init__(self, failure_rate: str | float, *, key: str) -> None:
        self._rate = _rate(failure_rate, key)
        self._interval: AutoInterval | None = None

    def begin(self, trainer: Trainer, now: float) -> Change:
        """Training begins; what attempts before this one have shown is read from the journal."""
        from framework.goodput.planning.interval import AutoInterval
        from framework.goodput.planning.observed import seen_before

        seen = seen_before(trainer.run.events, trainer.attempt)
        self._interval = AutoInterval(self._rate, trainer.world.size, seen, now)
        return _told(trainer, self._interval.change)

    def committed(self, trainer: Trainer, result: SaveResult, now: float) -> Change | None:
        """A save was committed; the new interval, if there is one."""
        assert self._interval is not None
        change = self._interval.committed(result.stall_seconds, result.persist_seconds, now)
        return None if change is None else _told(trainer, change)


def _rate(text: str | float, key: str) -> Rate:
    from framework.goodput.planning.rates import parse_rate

    try:
        return parse_rate(text)
    except ConfigError as error:
        raise ConfigError(f"{key}={text!r}: {error}") from error


def _told(trainer: Trainer, change: Change) -> Change:
    trainer.record("interval", step=trainer.progress.step, **change.to_json())
    log.info("step %d: %s", trainer.progress.step, words_of(change))
    return change


def words_of(change: Change) -> str:
    """A change of the interval as a sentence for the log."""
    from framework.goodput.planning.interval import BOUNDS, OPTIMUM
    from framework.goodput.reporting.words import duration

    inputs, choice = change.inputs, change.choice
    before = "" if change.before is None else f" instead of every {duration(change.before)}"
    parts = [f"saving every {duration(choice.seconds)}{before} from now on: {change.reason}"]
    if inputs.stall_seconds is not None and inputs.persist_seconds is not None:
        parts.append(f"a save costs {inputs.stall_seconds:.3g} s and is durable {inputs.persist_seconds:.3g} s later")
    believed = f"believed: one in {inputs.rate.gpu_hours:,.5g} rank-hours, seen: {inputs.failures}"
    parts.append(f"a failure is expected every {duration(inputs.mtbf_seconds)} ({believed})")
    if choice.optimum is not None and choice.bound != OPTIMUM:
        parts.append(f"the optimum would be {duration(choice.optimum)}, but {BOUNDS[choice.bound]}")
    return "; ".join(parts)
