"""How often things fail: published rates, rates as users write them, and what a run's own failures make of them.

Guarantee: a rate carries its source; published ones differ by a factor of 750, so whoever uses one says which. No failure
so far never means that there will be none.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from framework.errors import ConfigError, suggest
from framework.goodput.accounts.gamma import gamma_quantile

DEFAULT_RATE = "llama3"
HOURS_PER_YEAR = 8760.0


@dataclass(frozen=True, slots=True)
class Rate:
    """How often one GPU, or one rank where there is none, ends a job by failing.

    Args:
        text: As it was asked for.
        gpu_hours: Mean GPU-hours between failures, positive.
        source: Where it is from.
    """

    text: str
    gpu_hours: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class Blend:
    """A rate after what was seen, in mean GPU-hours between failures.

    Args:
        gpu_hours: The estimate.
        low: Lower end of its 90 % interval.
        high: Upper end.
    """

    gpu_hours: float
    low: float
    high: float


PRESETS = {
    "llama3": Rate("llama3", 54 * 24 * 16_384 / 466, "466 interruptions in 54 days on 16,384 GPUs (Llama 3, 2024)"),
    "rsc1": Rate("rsc1", 1000 * 24 * 8 / 6.5, "6.5 failures in 1,000 days of nodes of 8 GPUs (Meta RSC-1, 2024)"),
    "delta": Rate("delta", 608 * 1.9, "an error every 1.9 h on 608 GPUs (Delta); many of them end no job"),
}
_PER_YEAR = re.compile(r"\s*([0-9.eE+-]+)\s*%\s*/\s*(yr|year|y|a)\s*")


def parse_rate(text: str | float) -> Rate:
    """A rate as users write it: a preset, `1%/yr` of all GPUs, or GPU-hours per failure.

    Raises:
        ConfigError: It is none of these, or not positive and finite.
    """
    word = str(text).strip()
    if word.lower() in PRESETS:
        return PRESETS[word.lower()]
    per_year = _PER_YEAR.fullmatch(word)
    try:
        value = float(per_year[1] if per_year else word)
    except ValueError:
        hint = suggest(word, tuple(PRESETS))
        raise ConfigError(
            f"{word!r} is no failure rate. Write {', '.join(PRESETS)}, a share per year (1%/yr), or GPU-hours per failure.{hint}"
        ) from None
    if isinstance(text, bool) or not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{word!r} is no failure rate: it must be greater than 0 and finite.")
    if per_year:
        return Rate(word, 100 * HOURS_PER_YEAR / value, f"{value:g} % of all GPUs fail in a year")
    return Rate(word, value, "given")


def mean_hours(rate: Rate, failures: int, gpu_hours: float) -> float:
    """Mean GPU-hours between failures, of a rate that was believed and of failures that were seen.

    The mean of a gamma prior of shape 1 at that rate, after Poisson failures: the belief weighs as much as one failure.

    Args:
        rate: What was believed.
        failures: How many were seen.
        gpu_hours: In how many GPU-hours.
    """
    return (rate.gpu_hours + gpu_hours) / (1 + failures)


def blend(rate: Rate, failures: int, gpu_hours: float) -> Blend:
    """`mean_hours` and the 90 % interval of the same gamma distribution; arguments as there."""
    total = rate.gpu_hours + gpu_hours
    low, high = (total / gamma_quantile(1 + failures, share) for share in (0.95, 0.05))
    return Blend(mean_hours(rate, failures, gpu_hours), low, high)
