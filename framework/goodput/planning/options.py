"""Arguments that planning and simulating share.

Guarantee: wrong values are refused with the option and the value named. `--help` needs nothing heavy.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.goodput.planning.plan import Plan


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a job."""
    parser.add_argument("--gpus", required=True, help="number of GPUs, for example 16384")
    parser.add_argument(
        "--rate",
        default="llama3",
        help="llama3, rsc1, delta, a share of all GPUs a year (1%%/yr), or GPU-hours per failure; default llama3",
    )
    parser.add_argument("--stall", default="15s", help="how long a save holds the steps up, default 15s")
    parser.add_argument("--persist", default="120s", help="from there until it is durable, default 120s")
    parser.add_argument("--restart", default="600s", help="from a failure to the next step, default 600s")
    parser.add_argument("--interval", help="time between saves, for example 30min; default the best one")
    parser.add_argument("--days", default="54", help="length of the job, default 54")


def plan_of(arguments: argparse.Namespace, price: float | None = None) -> Plan:
    """The job that the options describe.

    Raises:
        ConfigError: One of them makes no sense.
    """
    from framework.goodput.planning.plan import Costs, Plan
    from framework.goodput.planning.rates import parse_rate

    gpus = number("--gpus", arguments.gpus)
    if gpus != int(gpus):
        raise ConfigError(f"--gpus={arguments.gpus} must be a whole number.")
    costs = Costs(*(seconds(f"--{name}", getattr(arguments, name)) for name in ("stall", "persist", "restart")))
    interval = None if arguments.interval is None else seconds("--interval", arguments.interval, above_zero=True)
    return Plan(int(gpus), number("--days", arguments.days), parse_rate(arguments.rate), costs, price, interval)


def number(option: str, text: str, *, above_zero: bool = True) -> float:
    """A finite number that is not negative.

    Raises:
        ConfigError: It is something else.
    """
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise ConfigError(f"{option}={text} is no number.") from None
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ConfigError(f"{option}={text} must be {'greater than' if above_zero else 'at least'} 0, and finite.")
    return value


def seconds(option: str, text: str, *, above_zero: bool = False) -> float:
    """A length of time, in seconds; a bare number is seconds.

    Raises:
        ConfigError: It is something else.
    """
    from framework.duration import SECONDS, Duration

    if text[-1:].isalpha():
        text = str(Duration.parse(text, key=option, allow=(SECONDS,)).value)
    return number(option, text, above_zero=above_zero)
