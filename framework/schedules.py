"""Learning-rate schedules: factories `(horizon) -> factor of a step`.

Guarantee: the factor is a pure function of the step, so that a resumed run needs no state for it. The first step is 0;
a schedule that decays reaches its final factor at the last step of the horizon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from framework.duration import EPOCHS, STEPS, Duration
from framework.errors import ConfigError

Factor = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Horizon:
    """How long a run is.

    Args:
        total_steps: Steps in all, or none where only a time bounds the run.
        num_samples: Samples per epoch.
        global_batch_size: Samples per step.
    """

    total_steps: int | None
    num_samples: int
    global_batch_size: int

    def steps(self, length: str | int | None, key: str) -> int:
        """A duration as a number of steps; none is 0.

        Raises:
            ConfigError: Not a duration in steps or epochs.
        """
        if length is None or length == 0:
            return 0
        duration = Duration.parse(length, key=key, allow=(STEPS, EPOCHS))
        duration.check_length(self.num_samples, key=key)
        return duration.steps(self.num_samples, self.global_batch_size)

    def needed(self, schedule: str) -> int:
        """The total number of steps.

        Raises:
            ConfigError: The run is bounded by a time alone.
        """
        if self.total_steps is None:
            raise ConfigError(
                f"schedule={schedule} needs the number of steps, and only trainer.max_time bounds this run. "
                f"Set trainer.max_steps or trainer.max_epochs too, or use framework.schedules.constant."
            )
        return self.total_steps


def _warm(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _share(step: int, start: int, last: int) -> float:
    """How far `step` is from `start` to `last`, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, last - start)))


def constant(horizon: Horizon, *, warmup: str | int | None = None) -> Factor:
    """1, after a linear warm-up."""
    warm = horizon.steps(warmup, "schedule.warmup")
    return lambda step: _warm(step, warm)


def linear(horizon: Horizon, *, warmup: str | int | None = None, final: float = 0.0) -> Factor:
    """A linear warm-up to 1, then a line down to `final`."""
    total, warm = horizon.needed("linear"), horizon.steps(warmup, "schedule.warmup")

    def factor(step: int) -> float:
        return _warm(step, warm) if step < warm else 1.0 - (1.0 - final) * _share(step, warm, total - 1)

    return factor


def cosine(horizon: Horizon, *, warmup: str | int | None = None, final: float = 0.0) -> Factor:
    """A linear warm-up to 1, then half a cosine down to `final` (Loshchilov and Hutter, 2016, without restarts)."""
    total, warm = horizon.needed("cosine"), horizon.steps(warmup, "schedule.warmup")

    def factor(step: int) -> float:
        if step < warm:
            return _warm(step, warm)
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * _share(step, warm, total - 1)))

    return factor


def wsd(
    horizon: Horizon, *, warmup: str | int | None = None, decay: str | int = "1epochs", final: float = 0.0
) -> Factor:
    """Warm-up, stable, decay (Hu et al., 2024): up to 1, constant, and a line down to `final` over the last `decay`.

    Raises:
        ConfigError: Warm-up and decay are longer than the run.
    """
    total, warm = horizon.needed("wsd"), horizon.steps(warmup, "schedule.warmup")
    down = horizon.steps(decay, "schedule.decay")
    if warm + down > total:
        raise ConfigError(
            f"schedule.warmup ({warm} steps) and schedule.decay ({down} steps) are longer than the run ({total} steps)."
        )

    def factor(step: int) -> float:
        return _warm(step, warm) if step < warm else 1.0 - (1.0 - final) * _share(step, total - 1 - down, total - 1)

    return factor
