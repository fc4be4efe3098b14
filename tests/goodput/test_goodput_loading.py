"""What the journal's `data` events become: sums, points, and a verdict in plain words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from framework.data.stats import DataStats
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Goodput
from framework.goodput.reporting import loading
from framework.goodput.tracking.points import PointMaker


def stats(**counts: Any) -> DataStats:
    made = DataStats(samples=100, **counts)
    for milliseconds in range(1, 101):
        made.add_read(milliseconds / 1000)
    return made


def account(fraction: float, is_measured: bool = True) -> Goodput:
    return dataclasses.replace(Ledger().total(), data_fetch_fraction=fraction, is_measured=is_measured)


def event(step: int, made: DataStats, attempt: int = 1) -> dict[str, Any]:
    return {"ev": "data", "att": attempt, "t": 1000.0 + step, "step": step, **made.to_json()}


def test_counts_survive_the_journal_and_add_up() -> None:
    made = stats(cache_hits=3, bytes_fetched=10, retries=1)
    assert DataStats.from_json(made.to_json()) == made
    total = loading.collected([event(50, made), {"ev": "end"}, event(100, made)])
    assert (total.samples, total.cache_hits, total.bytes_fetched, sum(total.reads.values())) == (200, 6, 20, 200)
    assert DataStats.from_json({"reads": {"x": 1, "5": "y", "7": 2}, "retries": "many", "new": 1}) == DataStats(
        reads={7: 2}
    )


def test_quantiles_of_read_times_are_right_within_a_tenth() -> None:
    assert stats().read_seconds(0.5) == pytest.approx(0.05, rel=0.11)
    assert stats().read_seconds(0.95) == pytest.approx(0.095, rel=0.11)
    assert DataStats().read_seconds(0.5) is None


def test_taking_starts_again_from_nothing() -> None:
    made = stats(skipped=2)
    assert made.take().skipped == 2
    assert made == DataStats()


@pytest.mark.parametrize(
    "fraction, counts, words",
    [
        (0.02, {}, "not input-bound: 2% of the time"),
        (0.38, {}, "input-bound: 38% of the time of the steps was spent waiting for data; raise loader.num_workers"),
        (0.38, {"cache_hits": 1, "cache_misses": 9}, "raise loader.look_ahead"),
        (0.38, {"cache_hits": 9, "cache_misses": 1}, "make decoding cheaper"),
    ],
)
def test_the_verdict_says_what_to_do(fraction: float, counts: dict[str, int], words: str) -> None:
    assert words in loading.verdict(stats(**counts), account(fraction))


def test_what_was_not_measured_has_no_verdict() -> None:
    assert "not measured" in loading.verdict(stats(), account(0.0, is_measured=False))


def test_the_report_names_what_happened_and_nothing_else() -> None:
    made = stats(cache_hits=1, cache_misses=1, bytes_fetched=2_000_000, retries=1, skipped=2)
    _, counts = loading.sentences(made, account(0.2))
    assert "50% of the files were in the cache" in counts
    assert "1 request was repeated, 2 samples could not be loaded" in counts
    assert "loader process" not in counts
    assert list(loading.sentences(DataStats(), account(0.0))) == []


def test_points_are_rates_of_the_last_steps_and_sums_since_the_beginning() -> None:
    maker = PointMaker()
    first = maker.feed(event(50, stats(cache_misses=4, bytes_fetched=100))).points
    second = maker.feed(event(100, stats(cache_hits=3, cache_misses=1, bytes_fetched=50))).points
    again = maker.feed(event(100, stats(retries=5), attempt=2)).points
    values = [{point.key: point.value for point in points} for points in (first, second, again)]
    assert (values[0]["data/cache_hit_rate"], values[1]["data/cache_hit_rate"]) == (0.0, 0.75)
    assert (values[0]["data/bytes_fetched"], values[1]["data/bytes_fetched"]) == (100, 150)
    assert values[0]["data/read_p95_seconds"] == pytest.approx(0.095, rel=0.11)
    assert "data/retries" not in values[0]
    assert values[2] == {"data/retries": 5.0}  # the step was there already, but not this metric


def test_the_part_of_a_step_that_waits_is_a_point_of_each_step() -> None:
    maker = PointMaker()
    steps = {"ev": "steps", "att": 1, "t": 1010.0, "first": 1, "start": 1000.0, "loss": [1.0, 1.0], "lr": [0.1, 0.1],
             "seconds": {"data_wait": [1.0, 0.0], "productive": [3.0, 2.0]}}  # fmt: skip
    points = [point for point in maker.feed(steps).points if point.key == "data/fetch_fraction"]
    assert [(point.step, point.value) for point in points] == [(1, 0.25), (2, 0.0)]
