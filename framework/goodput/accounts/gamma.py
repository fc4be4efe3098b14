"""Quantiles of the gamma distribution, from which the bounds of a failure rate come; half those of chi-square.

Guarantee: pure arithmetic without a library: exact to a float up to shape 100, to four digits above it.
"""

from __future__ import annotations

import math
from statistics import NormalDist

MANY = 100


def gamma_quantile(shape: int, share: float) -> float:
    """Below which a share of the gamma distribution of scale 1 lies: by bisection, or by Wilson and Hilferty (1931)."""
    if shape > MANY:  # there it is right to four digits
        return shape * (1 - 1 / (9 * shape) + NormalDist().inv_cdf(share) / (3 * math.sqrt(shape))) ** 3
    low, high = 0.0, shape + 10 * math.sqrt(shape) + 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _gamma_below(shape, middle) < share else (low, middle)
    return (low + high) / 2


def _gamma_below(shape: int, x: float) -> float:
    """The gamma distribution of a whole shape: as likely as that many Poisson events of mean `x`."""
    if x <= 0:
        return 0.0
    return 1.0 - math.fsum(math.exp(i * math.log(x) - x - math.lgamma(i + 1)) for i in range(shape))
