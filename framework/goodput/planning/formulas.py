"""What failures and saves cost a job, in closed form.

Guarantee: failures are a Poisson process that also strikes during saves and restarts; within that the formulas are exact,
except where a name or a docstring says otherwise. No rounding, no hidden unit: all lengths are in one unit of the
caller's choice, which is seconds in this package.

Where lifetimes vary more than that (Weibull with a shape below 1), goodput is better than what is said here.
"""

from __future__ import annotations

import math


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
