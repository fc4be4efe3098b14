"""What failures would cost a job of some size, and how often it should save.

Guarantee: closed forms alone (`planning.formulas`), each named where it is shown, with the failure rate it used and where
that is from. All lengths in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from framework.goodput.planning import formulas
from framework.goodput.planning.rates import Rate
from framework.goodput.reporting.words import duration

LEAST_INTERVAL = 1.0  # where a save costs nothing the best one would be none at all
DAY, HOUR, MINUTE = 86_400.0, 3600.0, 60.0
INTERVALS = tuple(minutes * MINUTE for minutes in (1, 5, 10, 15, 30, 60, 120, 240, 1440))
SIZES = (256, 1024, 4096, 8192, 16_384)
EXACT = (
    "exact for Poisson failures: t / (M exp((R + P) / M) (exp((t + C) / M) - 1)), t interval, C stall, P persist, "
    "R restart, M mean time between failures"
)
OPTIMUM = "its maximum, never below the persist time; Daly (2006) beside"
FIRST_ORDER = "first-order: 1 - t / 2M; leaves out what saves and restarts cost"


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving and failing cost a job, in seconds.

    Args:
        stall: How long a save holds the steps up.
        persist: From there until the save is durable, while the job goes on.
        restart: From a failure to the first step after it.
    """

    stall: float
    persist: float
    restart: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect at one interval.

    Args:
        interval: Time of computing between two saves, seconds.
        goodput: Share of all time that ends up in finished work.
        first_order: The same by the first-order formula; may be negative.
        lost_per_failure: Work done again after a failure, seconds, to first order.
        lost_hours_per_day: Hours of work of the whole job done again, per day, to first order.
        gpu_hours_wasted: GPU-hours of the whole job that are not finished work.
        price_wasted: Their price, none without one.
    """

    interval: float
    goodput: float
    first_order: float
    lost_per_failure: float
    lost_hours_per_day: float
    gpu_hours_wasted: float
    price_wasted: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A job of one size.

    Args:
        gpus: Number of GPUs.
        days: Length of the job.
        rate: How often one GPU ends the job.
        costs: What saving and failing cost.
        price: Of a GPU-hour, none if unknown.
        interval: The interval asked for, seconds; none for the optimum alone.
    """

    gpus: int
    days: float
    rate: Rate
    costs: Costs
    price: float | None = None
    interval: float | None = None

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the whole job, seconds."""
        return self.rate.gpu_hours * HOUR / self.gpus

    @property
    def failures_per_day(self) -> float:
        return DAY / self.mtbf

    @property
    def survival(self) -> float:
        """Probability that nothing fails during the whole job."""
        return formulas.survival(self.days * DAY / self.mtbf)

    @property
    def best(self) -> Outlook:
        """At the interval at which goodput is greatest, but no less than a second."""
        return self.at(formulas.optimum(self.costs.stall, self.mtbf, max(self.costs.persist, LEAST_INTERVAL)))

    def at(self, interval: float) -> Outlook:
        """What to expect at an interval."""
        costs, mtbf = self.costs, self.mtbf
        share = formulas.goodput(interval, costs.stall, mtbf, costs.restart, costs.persist)
        loss = formulas.mean_loss(interval, costs.persist)
        wasted = (1.0 - share) * self.gpus * self.days * 24
        price = None if self.price is None else wasted * self.price
        first = formulas.first_order(interval, mtbf)
        return Outlook(interval, share, first, loss, self.failures_per_day * loss / HOUR, wasted, price)

    def sized(self, gpus: int) -> Plan:
        """The same job on another number of GPUs."""
        return replace(self, gpus=gpus)

    def to_json(self) -> dict[str, Any]:
        """JSON values; seconds unless a name says otherwise."""
        return {
            "gpus": self.gpus,
            "days": self.days,
            "rate": {"text": self.rate.text, "gpu_hours_per_failure": self.rate.gpu_hours, "source": self.rate.source},
            "stall_seconds": self.costs.stall,
            "persist_seconds": self.costs.persist,
            "restart_seconds": self.costs.restart,
            "mtbf_seconds": self.mtbf,
            "failures_per_day": self.failures_per_day,
            "failure_probability": 1.0 - self.survival,
            "survival_probability": self.survival,
            "young_seconds": formulas.young(self.costs.stall, self.mtbf),
            "daly_seconds": formulas.daly(self.costs.stall, self.mtbf),
            "best": _values(self.best),
            "chosen": None if self.interval is None else _values(self.at(self.interval)),
            "grid": [
                {"gpus": one.gpus, "mtbf_seconds": one.mtbf, "best": _values(one.best)}
                | {"at": [_values(one.at(interval)) for interval in intervals(self)]}
                for one in map(self.sized, sizes(self))
            ],
            "formulas": {"goodput": EXACT, "best": OPTIMUM, "first_order": FIRST_ORDER},
        }


def sizes(plan: Plan) -> list[int]:
    """The cluster sizes of the table: some usual ones and the one asked for."""
    return sorted({*SIZES, plan.gpus})


def intervals(plan: Plan) -> list[float]:
    """The intervals of the table: some usual ones and the one asked for."""
    return sorted({*INTERVALS, *(() if plan.interval is None else (plan.interval,))})


def lines_of(plan: Plan) -> Iterator[str]:
    """The plan in words."""
    rate, costs, best = plan.rate, plan.costs, plan.best
    source = f": {rate.source}" if rate.source else ""
    yield f"{plan.gpus:,} GPUs for {plan.days:g} days"
    yield f"failure rate {rate.text}: one failure in {rate.gpu_hours:,.5g} GPU-hours{source}"
    yield (
        f"the job fails {plan.failures_per_day:.3g} times a day, every {duration(plan.mtbf)}; "
        f"it fails at least once with probability {1 - plan.survival:.1%} (survives with {plan.survival:.1%})"
    )
    yield (
        f"a save holds it up for {duration(costs.stall)} and is durable {duration(costs.persist)} later; "
        f"starting again takes {duration(costs.restart)}"
    )
    if plan.interval is not None:
        yield f"saving every {_outlook(plan, plan.at(plan.interval))}"
    yield f"best: every {_outlook(plan, best)}"
    beside = formulas.daly(costs.stall, plan.mtbf)
    bound = ", held up by the persist time" if best.interval <= costs.persist else ""
    yield f"Daly's optimum (2006): {duration(beside)}{bound}"
    restart = -math.expm1(-costs.restart / plan.mtbf)
    yield f"starting again alone costs {restart:.1%} of all time, whatever the interval"


def _outlook(plan: Plan, one: Outlook) -> str:
    price = "" if one.price_wasted is None else f", a price of {one.price_wasted:,.0f}"
    total = plan.gpus * plan.days * 24
    return (
        f"{duration(one.interval)}: goodput {one.goodput:.1%} (first-order {one.first_order:.1%}); "
        f"{one.gpu_hours_wasted:,.0f} of {total:,.0f} GPU-hours are not finished work{price}; "
        f"{duration(one.lost_per_failure)} of work lost per failure, {one.lost_hours_per_day:.3g} h a day"
    )


def table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Goodput by cluster size and interval: the columns and the rows."""
    asked = intervals(plan)
    columns = [">GPUs", ">fails every", ">best interval", ">goodput", *(f">{_short(interval)}" for interval in asked)]
    rows = []
    for one in map(plan.sized, sizes(plan)):
        best = one.best
        shares = [f"{one.at(interval).goodput:.1%}" for interval in asked]
        rows.append([f"{one.gpus:,}", duration(one.mtbf), duration(best.interval), f"{best.goodput:.1%}", *shares])
    return columns, rows


def remarks(plan: Plan) -> Sequence[str]:
    """How the figures were made."""
    return (
        f"goodput: {EXACT}.",
        f"best: {OPTIMUM}.",
        f"{FIRST_ORDER}.",
        "The rate decides: published ones differ by a factor of 750. Failures that vary more than a Poisson process "
        "(Weibull, shape below 1) cost less than this.",
    )


def _short(seconds: float) -> str:
    if seconds % HOUR == 0:
        return f"{seconds / HOUR:g} h"
    return f"{seconds / MINUTE:g} min" if seconds % MINUTE == 0 else f"{seconds:g} s"


def _values(one: Outlook) -> dict[str, Any]:
    return {
        "interval_seconds": one.interval,
        "goodput": one.goodput,
        "first_order": one.first_order,
        "lost_seconds_per_failure": one.lost_per_failure,
        "lost_hours_per_day": one.lost_hours_per_day,
        "gpu_hours_wasted": one.gpu_hours_wasted,
        "price_wasted": one.price_wasted,
    }
