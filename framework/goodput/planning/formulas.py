"""What failures and saves cost a job, in closed form.

Guarantee: failures are a Poisson process that also strikes during saves and restarts; within that the formulas are exact,
except where a name or a docstring says otherwise. No rounding, no hidden unit: all lengths are in one unit of the
caller's choice, which is seconds in this package.

Where lifetimes vary more than that (Weibull with a shape below 1), goodput is better than what is said here.
"""

from __future__ import annotations

import math


def survival(failures: float) -> float:
    """The probability that nothing fails while that many failures are expected: `exp(-N r T)`, a Poisson process.

    Args:
        failures: GPUs times failures per GPU and time, times the length of time.
    """
    return math.exp(-failures)


def first_order(interval: float, mtbf: float) -> float:
    """Goodput if each failure costs half an interval and nothing else; may be negative.

    What published figures often use. It leaves out what saves and restarts cost, and that failures also strike while
    lost work is done again: compare `goodput`.

    Args:
        interval: Time of computing between two saves.
        mtbf: Mean time between failures of the whole job, positive.
    """
    return 1.0 - interval / (2.0 * mtbf)


def mean_loss(interval: float, persist: float = 0.0) -> float:
    """Work lost by one failure, to first order: half an interval, and what was done until the last save was durable."""
    return interval / 2.0 + persist


def young(stall: float, mtbf: float) -> float:
    """The best interval to first order: J. W. Young, CACM 17 (1974). Arguments as for `daly`."""
    return math.sqrt(2.0 * stall * mtbf)


def optimum(stall: float, mtbf: float, persist: float = 0.0) -> float:
    """The interval at which `goodput` is greatest: the root of `1 - exp(-(t + stall) / mtbf) = t / mtbf`, by bisection.

    Args:
        stall: How long a save holds the job up, not negative; without any the answer is the least there is.
        mtbf: Mean time between failures of the whole job, positive.
        persist: The least interval: one save is in flight at a time.
    """
    low, high = 0.0, mtbf
    for _ in range(200):
        middle = (low + high) / 2
        is_below = middle / mtbf < -math.expm1(-(middle + stall) / mtbf)
        low, high = (middle, high) if is_below else (low, middle)
    return max((low + high) / 2, persist)


def daly(stall: float, mtbf: float) -> float:
    """The best time of computing between two saves: Daly's higher-order optimum.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), eq. 37.
    It is within 0.6 % of the optimum of `goodput` for stalls up to half the mean time between failures. What a restart
    costs does not move it.

    Args:
        stall: How long a save holds the job up, not negative.
        mtbf: Mean time between failures of the whole job, positive.
    """
    if stall >= 2 * mtbf:
        return mtbf
    x = math.sqrt(stall / (2 * mtbf))
    return math.sqrt(2 * stall * mtbf) * (1 + x / 3 + x * x / 9) - stall


def goodput(interval: float, stall: float, mtbf: float, restart: float = 0.0, persist: float = 0.0) -> float:
    """The share of all time that ends up in finished work.

    A life of the job is a restart, then intervals of `interval` + `stall`. The k-th save counts if the job lives until
    it is durable, `persist` later: the expected work of a life is the interval times the sum of those probabilities, over
    an expected life of `mtbf`.

    Args:
        interval: Time of computing between two saves, positive.
        stall: How long a save holds the job up.
        mtbf: Mean time between failures of the whole job, positive.
        restart: From a failure to the first step after it.
        persist: From the end of a stall until that save is durable, while the job goes on.
    """
    exponent = (interval + stall) / mtbf
    if exponent > 700:  # no save is ever reached
        return 0.0
    return interval / (mtbf * math.expm1(exponent)) * math.exp(-(restart + persist) / mtbf)
