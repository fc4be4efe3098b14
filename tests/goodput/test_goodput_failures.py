"""How often a run failed, and what it took until it trained again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from goodput_story import Story
from hypothesis import given, settings
from hypothesis import strategies as st
from test_goodput_accounting import acts
from test_goodput_points import points
from test_goodput_properties import Script, told

from framework.goodput.__main__ import main
from framework.goodput.accounts.failures import Failures, bounds, failures
from framework.goodput.accounts.ledger import Ledger


def of(story: Story, is_live: bool = False) -> Failures:
    ledger = Ledger()
    for event in story.events:
        ledger.add(event)
    return failures(ledger, None, is_live)


def two_failures() -> Story:
    """A failure that said so: 4 s to notice, 26 down; and a kill: 50 down, with a start that failed in them."""
    story = (
        Story().start().train(30, productive=10.0).commit().wait(14).event("failure", type="E", message="m", step=30)
    )
    story.wait(1).end("failed", 1).wait(25).start(init=6, restored=30, restore_seconds=2).train(30, productive=10.0)
    story.commit().wait(20)
    story.launch().wait(3).event("failure", type="E", message="m").end("failed", 1).wait(30).start(
        init=6, restored=60, restore_seconds=4
    )
    return story.train(30, productive=10.0).end()


def test_failures_and_recoveries_are_counted_and_their_parts_averaged() -> None:
    found = of(two_failures())
    assert (found.count, found.failed_starts, found.recoveries) == (2, 1, 2)
    assert found.training_seconds == pytest.approx(900)
    assert found.mtbf_seconds == pytest.approx(450)
    assert found.rate_per_day == pytest.approx(2 * 86400 / 900)
    assert found.detect_seconds == pytest.approx((4 + 0) / 2)
    assert found.down_seconds == pytest.approx((26 + 20 + 30) / 2)
    assert found.restore_seconds == pytest.approx((2 + 4) / 2)
    assert found.mttr_seconds == pytest.approx(((4 + 26 + 6 + 2) + (20 + 3 + 30 + 6 + 4)) / 2)


def test_a_run_that_was_stopped_in_order_or_lives_has_not_failed() -> None:
    story = Story().start().train(30, productive=1.0).end("killed", 143).wait(9).start(restored=30)
    story.train(30, productive=1.0)
    assert of(story, is_live=True).count == 0
    assert of(story).count == 1, "it ended without a word"
    assert of(story.end()).count == 0
    assert of(Story()) == Failures(0, 0, 0.0, None, None, None, None, 0, None, None, None, None, None)


@pytest.mark.parametrize(
    ("count", "low", "high"),  # chi-square of 2, 4, 12 and 10 degrees of freedom, from printed tables
    [(0, 2 / 5.991, None), (1, 2 / 9.488, 2 / 0.1026), (5, 2 / 21.026, 2 / 3.940)],
)
def test_the_interval_is_that_of_chi_square(count: int, low: float, high: float | None) -> None:
    found = bounds(count, 1000.0)
    assert found[0] == pytest.approx(1000 * low, rel=1e-3)
    assert found[1] == (None if high is None else pytest.approx(1000 * high, rel=1e-3))


@settings(max_examples=200, deadline=None)
@given(st.lists(acts, max_size=25), st.booleans())
def test_whatever_a_run_does_its_failures_add_up(script: Script, is_live: bool) -> None:
    found = of(told(script), is_live)
    assert 0 <= found.recoveries <= found.count
    assert found.training_seconds >= 0
    if found.mtbf_seconds is not None and found.training_seconds > 0:
        assert found.mtbf_low_seconds is not None and found.mtbf_high_seconds is not None
        assert found.mtbf_low_seconds < found.mtbf_seconds < found.mtbf_high_seconds
    for part in (found.detect_seconds, found.down_seconds, found.queue_seconds, found.restore_seconds):
        assert part is None or part >= 0


def test_they_are_published_with_the_next_new_step_and_only_when_they_change() -> None:
    made = [point for point in points(two_failures().events) if point.key.startswith(("failures/", "recovery/"))]
    counts = [point.value for point in made if point.key == "failures/count"]
    assert counts == [1, 2]
    last = {point.key: point.value for point in made}
    assert last["recovery/mttr_seconds"] == pytest.approx((38 + 63) / 2)
    assert last["failures/mtbf_seconds"] == pytest.approx(900 / 2)
    assert not [p for p in points(Story().start().train(30, productive=1.0).end().events) if p.key.startswith("fail")]


def test_the_report_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = two_failures()
    for attempt in range(1, 5):
        folder = tmp_path / f"r/events/att-{attempt:04d}"
        folder.mkdir(parents=True)
        lines = [json.dumps(event) + "\n" for event in story.events if event["att"] == attempt]
        (folder / "rank0.jsonl").write_text("".join(lines))
    assert main(["report", str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert "2 failures, one every 7 min 30 s of training (90 % interval 2 min 23 s to 42 min 13 s)\n" in said
    assert "it trained again after 50.5 s on average (noticing 2.0 s, down 38.0 s, restore 3.0 s)\n" in said
    assert "rank-hours 0.281, of these productive 0.25" in said
    assert "it trained again after 50.5 s on average" in (tmp_path / "r/report.html").read_text()
    assert main(["report", str(tmp_path / "r"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"]["count"] == 2
