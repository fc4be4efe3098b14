"""Points are a function of the journal, and no step is shown twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from goodput_runs import Run
from goodput_story import Story
from hypothesis import given, settings
from hypothesis import strategies as st
from test_goodput_accounting import acts, perform

from framework.goodput.tracking.points import Point, PointMaker
from framework.goodput.tracking.tail import JournalTail


def points(events: list[dict[str, Any]]) -> list[Point]:
    maker = PointMaker()
    return [point for event in events for point in maker.feed(event).points] + maker.rest()


@settings(max_examples=200, deadline=None)
@given(st.lists(acts, max_size=25))
def test_no_metric_has_two_points_for_one_step(script: list[tuple[Any, ...]]) -> None:
    story = Story()
    story.attempt = 1
    for act in script:
        perform(story, act)
    made = points(story.events)
    assert made == points(story.events)
    assert not [double for double, count in Counter((p.key, p.step) for p in made).items() if count > 1]


def test_the_last_account_is_the_one_at_the_end() -> None:
    story = Story().start().train(10, productive=1.0).wait(10).end()
    ratios = [point for point in points(story.events) if point.key == "goodput/ratio"]
    assert [(point.step, round(point.value, 6)) for point in ratios] == [(10, 0.5)]


def test_accounts_are_at_least_five_seconds_apart() -> None:
    story = Story().start()
    for _ in range(100):
        story.train(1, productive=1.0)
    assert 15 <= len([p for p in points(story.end().events) if p.key == "goodput/ratio"]) <= 25


def test_a_skipped_value_is_left_out_and_a_nan_is_kept() -> None:
    story = Story().start()
    story.event(
        "steps", first=1, loss=[float("nan"), 1.0], lr=[0.1, 0.1], metrics={"top1": [None, 0.5], "a[0]": [1, 2]}
    )
    made = {(point.key, point.step): point.value for point in points(story.events)}
    assert made.keys() == {
        ("train/loss", 1), ("train/loss", 2), ("train/lr", 1), ("train/lr", 2), ("train/top1", 2), ("train/a_0_", 1),
        ("train/a_0_", 2),
    }  # fmt: skip
    assert made["train/loss", 1] != made["train/loss", 1]


def test_the_tail_gives_each_whole_event_once_whatever_the_attempts_do(tmp_path: Path) -> None:
    run = Run(tmp_path)
    tail = JournalTail(run.directory.events)
    assert list(tail.read()) == []
    run.start(1)
    assert [event["ev"] for event in tail.read()] == ["attempt_start", "train_start"]
    file = run.journal.path
    with file.open("ab") as stream:
        stream.write(b'{"att": 1, "ev": "st')
    assert list(tail.read()) == []
    old = run.journal
    run.start(2)
    assert [event["att"] for event in tail.read()] == [2, 2]
    old.event("late")
    run.end()
    assert [event["ev"] for event in tail.read()] == ["end"]
    assert list(tail.read()) == []
    old.close()
