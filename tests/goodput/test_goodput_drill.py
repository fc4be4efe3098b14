"""A drill of failures of many kinds: the report sums to the wall clock, and what it calls lost is what was done again."""

from __future__ import annotations

from pathlib import Path

import pytest
from failure_drill import FAILURES, Failure, drill, steps_redone

from framework.data.audit.check import audit
from framework.goodput.reporting.report import build

FEW = ("SIGKILL of rank 1", "SIGTERM", "kill in a write", "damaged checkpoint")


def check(path: Path, order: list[Failure]) -> None:
    report = build(path)
    goodput, redone = report.goodput, steps_redone(path)
    assert goodput.attempts == len(order) + 1
    for line, failure in zip(report.attempts, order, strict=False):
        count = redone[line.attempt]
        print(f"  {failure.name:22} {line.ended:7} at {line.last}, {count:2} steps done again  {line.message[:60]}")
        assert line.ended in failure.ended and failure.says in line.message, failure.name
    assert abs(sum(goodput.seconds.values()) - goodput.wall) <= 1e-3 * goodput.wall / 3600
    assert min(goodput.seconds.values()) >= 0
    assert goodput.steps_lost == sum(redone.values())
    lost = {one.attempt: one.lost_steps for one in report.incidents if one.lost_steps}
    assert lost == {attempt: count for attempt, count in redone.items() if count}
    assert goodput.status == "finished"
    found = audit(path / "events")
    assert found.gaps == [] and found.steps == goodput.steps_done


def test_what_is_lost_is_what_was_done_again(tmp_path: Path) -> None:
    check(*drill(tmp_path, [one for one in FAILURES if one.name in FEW], seed=1))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_failures_of_all_kinds_leave_accounts_that_hold(seed: int, tmp_path: Path) -> None:
    check(*drill(tmp_path, FAILURES, seed))
