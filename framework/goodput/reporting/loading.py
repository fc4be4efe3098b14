"""Says in plain words what loading did, and whether the model waits for it.

Guarantee: counts come from the journal's `data` events, seconds from the account; nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from framework.data.stats import DataStats
from framework.goodput.accounts.results import Goodput
from framework.speaking import size_text

INPUT_BOUND = 0.1  # of the time of the steps: waiting that is worth acting on
LOW_HIT_RATE = 0.5


def collected(events: Iterable[Mapping[str, Any]]) -> DataStats:
    """The sum of all `data` events."""
    total = DataStats()
    for event in events:
        if event.get("ev") == "data":
            total.add(DataStats.from_json(event))
    return total


def to_json(stats: DataStats, goodput: Goodput) -> dict[str, Any]:
    """Counts, rates and the verdict; seconds, bytes and fractions."""
    return {
        **stats.to_json(),
        "cache_hit_rate": stats.hit_rate,
        "read_p50_seconds": stats.read_seconds(0.5),
        "read_p95_seconds": stats.read_seconds(0.95),
        "fetch_fraction": goodput.data_fetch_fraction,
        "verdict": verdict(stats, goodput),
    }


def verdict(stats: DataStats, goodput: Goodput) -> str:
    """Whether the model waits for data, and what to do about it."""
    share = goodput.data_fetch_fraction
    if not goodput.is_measured:
        return "not measured (callbacks.goodput is off)"
    if share < INPUT_BOUND:
        return f"not input-bound: {share:.0%} of the time of the steps was spent waiting for data"
    return f"input-bound: {share:.0%} of the time of the steps was spent waiting for data; {_advice(stats)}"


def sentences(stats: DataStats, goodput: Goodput) -> Iterator[str]:
    """The lines of the report."""
    if not stats.samples and goodput.data_fetch_fraction < INPUT_BOUND:
        return
    yield f"data: {verdict(stats, goodput)}"
    parts = []
    if stats.hit_rate is not None:
        parts.append(f"{stats.hit_rate:.0%} of the files were in the cache")
    if stats.bytes_fetched:
        parts.append(f"{size_text(stats.bytes_fetched)} fetched")
    median, late = stats.read_seconds(0.5), stats.read_seconds(0.95)
    if median is not None and late is not None:
        parts.append(f"a read took {_milliseconds(median)}, 1 in 20 over {_milliseconds(late)}")
    for count, one, many in (
        (stats.retries, "request was repeated", "requests were repeated"),
        (stats.skipped, "sample could not be loaded", "samples could not be loaded"),
        (stats.worker_restarts, "loader process died and was replaced", "loader processes died and were replaced"),
    ):
        if count:
            parts.append(f"{count:,} {one if count == 1 else many}")
    if parts:
        yield "data on rank 0: " + ", ".join(parts)


def _advice(stats: DataStats) -> str:
    if stats.hit_rate is not None and stats.hit_rate < LOW_HIT_RATE:
        return "files come from the volume: raise loader.look_ahead or loader.num_workers, or give the cache more room"
    return "raise loader.num_workers or loader.prefetch_factor, or make decoding cheaper"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
