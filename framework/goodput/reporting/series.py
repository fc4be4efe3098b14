"""What the pictures of a run show, as numbers.

Guarantee: a pure function of the journal. However long the run, there are at most about `MAX_POINTS` points in a picture:
intervals too short to be seen are put together with the seconds of each category kept, steps are put together as minimum,
median and maximum. The seconds of all cells of the timeline sum to the account's, but for rounding to microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from framework.goodput.accounts.results import Interval
from framework.goodput.accounts.timeline import nanoseconds

MAX_POINTS = 2000
_APART = ("evaluation", "checkpoint")  # inside the record of a step, but no part of its time


def cells(intervals: Sequence[Interval], limit: int = MAX_POINTS) -> list[dict[str, Any]]:
    """The timeline as stretches of one attempt each.

    Args:
        intervals: The timeline.
        limit: About how many cells there may be; shorter intervals than `wall * 2 / limit` are put together beyond that.

    Returns:
        `start`, `end`, `attempt`, `first` and `last` step (none outside of steps), `seconds` by category.
    """
    shortest = 0.0 if len(intervals) <= limit or not intervals else 2 * intervals[-1].end / limit
    found: list[dict[str, Any]] = []
    is_open = False
    for one in intervals:
        length = one.end - one.start
        is_short = length < shortest
        if not (is_open and is_short and found[-1]["attempt"] == one.attempt):
            found.append({"start": one.start, "attempt": one.attempt, "first": one.first, "seconds": {}})
        cell = found[-1]
        cell["seconds"][one.category] = cell["seconds"].get(one.category, 0.0) + length
        cell["end"], cell["last"] = one.end, one.last if one.last is not None else cell.get("last")
        cell["first"] = one.first if cell["first"] is None else cell["first"]
        is_open = is_short and one.end - cell["start"] < shortest
    for cell in found:
        cell["start"], cell["end"] = round(cell["start"], 6), round(cell["end"], 6)
        cell["seconds"] = {name: round(value, 6) for name, value in cell["seconds"].items()}
    return found


def steps(events: Iterable[Mapping[str, Any]], limit: int = MAX_POINTS) -> dict[str, Any]:
    """How long steps took (without evaluation and saves), and how long of it they waited for data; in seconds.

    Where steps were done again, the last time counts.

    Args:
        events: The journal.
        limit: Number of points.

    Returns:
        Columns: `first` and `last` step of each point; `step` and `fetch` with `min`, `median`, `max` each.
    """
    taken: dict[int, tuple[float, float]] = {}
    for event in events:
        seconds = event.get("seconds")
        if event["ev"] != "steps" or not isinstance(seconds, Mapping) or type(event.get("first")) is not int:
            continue
        columns = {name: values for name, values in seconds.items() if isinstance(values, list)}
        counted = [values for name, values in columns.items() if name not in _APART]
        waits = columns.get("data_wait", [])
        for index in range(max((len(values) for values in counted), default=0)):
            whole = sum(nanoseconds(values[index]) for values in counted if index < len(values))
            wait = nanoseconds(waits[index]) if index < len(waits) else 0
            taken[event["first"] + index] = (whole / 1e9, wait / 1e9)
    numbers = sorted(taken)
    groups = [numbers[at : at + _width(numbers, limit)] for at in range(0, len(numbers), _width(numbers, limit))]
    return {
        "first": [group[0] for group in groups],
        "last": [group[-1] for group in groups],
        "step": _spread([[taken[number][0] for number in group] for group in groups]),
        "fetch": _spread([[taken[number][1] for number in group] for group in groups]),
    }


def checkpoints(saves: Sequence[Mapping[str, Any]], limit: int = MAX_POINTS) -> dict[str, Any]:
    """What saves cost, and how old the newest checkpoint had become when the next one was committed; in seconds.

    Args:
        saves: Committed saves in their order: `step`, `stall`, `persist`, `age`, each of these may be none.
        limit: Number of points.

    Returns:
        Columns: `first` and `last` step of each point; `stall`, `persist`, `age` with `min`, `median`, `max` each, none
        where nothing is known.
    """
    width = _width(saves, limit)
    groups = [saves[at : at + width] for at in range(0, len(saves), width)]
    columns = {
        name: _spread([[save[name] for save in group if save[name] is not None] for group in groups])
        for name in ("stall", "persist", "age")
    }
    return {
        "first": [group[0]["step"] for group in groups],
        "last": [group[-1]["step"] for group in groups],
        **columns,
    }


def _width(values: Sequence[Any], limit: int) -> int:
    return max(1, -(-len(values) // limit))


def _spread(groups: Sequence[Sequence[float]]) -> dict[str, list[float | None]]:
    def column(function: Any) -> list[float | None]:
        return [round(function(group), 9) if group else None for group in groups]

    return {"min": column(min), "median": column(statistics.median), "max": column(max)}
