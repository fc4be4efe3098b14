"""What holds of the account whatever a run does, and whatever becomes of its journal."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from goodput_story import Story
from hypothesis import given, settings
from hypothesis import strategies as st
from test_goodput_accounting import acts, lengths, perform

from framework.goodput import Goodput, Interval, account
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.tracking.points import PointMaker
from framework.journal import parse

Script = list[tuple[Any, ...]]

honest_acts = st.one_of(
    st.tuples(st.just("wait"), st.floats(0, 100)),
    st.tuples(st.just("clock"), st.floats(-5000, 5000)),
    st.tuples(
        st.just("train"),
        st.integers(1, 30),
        st.dictionaries(st.sampled_from(["productive", "data_wait", "evaluation", "checkpoint"]), lengths, max_size=4),
        st.booleans(),
    ),
    st.tuples(st.just("commit"), st.floats(0, 20)),
    st.tuples(st.just("failure")),
    st.tuples(st.just("end"), st.sampled_from(["finished", "stopped", "failed", "killed"])),
    st.tuples(st.just("start"), st.floats(0, 20), st.one_of(st.none(), st.integers(0, 60)), lengths),
    st.tuples(st.just("begin")),
    st.tuples(st.just("on"), st.integers(1, 8)),
)
junk = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.integers(-3, 3), st.sampled_from([-1.0, 1e308, 1e17, math.nan]),
    st.just([]), st.just([None, "x", -1.0]), st.just({}), st.just({"productive": [None, math.inf]}), st.just({"a": 1}),
)  # fmt: skip
FIELDS = (
    "previous",
    "allocated",
    "world_size",
    "ev",
    "att",
    "t",
    "m",
    "seq",
    "first",
    "start",
    "seconds",
    "step",
    "captured",
    "name",
    "boot_id",
    "started",
)
damage = st.one_of(
    st.tuples(st.just("drop"), st.integers(0, 60)),
    st.tuples(st.just("twice"), st.integers(0, 60)),
    st.tuples(st.just("swap"), st.integers(0, 60)),
    st.tuples(st.just("without"), st.integers(0, 60), st.sampled_from(FIELDS)),
    st.tuples(st.just("change"), st.integers(0, 60), st.sampled_from(FIELDS), junk),
)


def told(script: Script) -> Story:
    story = Story()
    story.attempt = 1
    for act in script:
        perform(story, act)
    return story


def damaged(events: list[dict[str, Any]], harms: Script) -> list[dict[str, Any]]:
    """The events that a reader gets of a journal that has come to harm."""
    events = [dict(event) for event in events]
    for kind, place, *how in harms:
        if not events:
            break
        at = place % len(events)
        match kind, *how:
            case ["drop"]:
                del events[at]
            case ["twice"]:
                events.insert(at, dict(events[at]))
            case ["swap"]:
                events[at - 1], events[at] = events[at], events[at - 1]
            case ["without", field]:
                events[at].pop(field, None)
            case ["change", field, value]:
                events[at][field] = value
    read = (parse(json.dumps(event).encode()) for event in events)
    return [event for event in read if event is not None]


def whole(seconds: float) -> int:
    """Whole nanoseconds: a float has them exactly up to 104 days."""
    return round(seconds * 1e9)


def check(result: Goodput, intervals: list[Interval]) -> None:
    """Every instant has one label, and the sums are those of the intervals: to the nanosecond."""
    assert sum(map(whole, result.seconds.values())) == whole(result.wall)
    assert min(result.seconds.values()) >= 0
    assert all(one.start < one.end for one in intervals)
    assert all(before.end == after.start for before, after in itertools.pairwise(intervals))
    by_category = dict.fromkeys(result.seconds, 0)
    for one in intervals:
        by_category[one.category] += whole(one.end) - whole(one.start)
    assert by_category == {name: whole(value) for name, value in result.seconds.items()}
    assert 0 <= result.durable_seconds <= result.seconds["productive"]
    assert 0 <= result.ratio_durable <= result.ratio <= 1
    for ratio, length in ((result.window_1h, 3600), (result.window_24h, 86400)):
        assert ratio == pytest.approx(window(result, intervals, length), abs=1e-9)
    assert result.capacity <= result.ratio + 1e-12 and result.ratio <= result.runtime + 1e-12 <= 1 + 2e-12
    assert 0 <= result.rank_hours_productive <= result.rank_hours + 1e-9
    assert result.overlap_seconds >= 0 and result.clock_skew_seconds >= 0
    if intervals:
        assert (intervals[0].start, intervals[-1].end) == (0, result.wall)


def window(result: Goodput, intervals: list[Interval], length: int) -> float:
    """The productive share of a window, read off the timeline: it begins on a whole minute of the run."""
    begin = max(0, (whole(result.wall) - length * 10**9) // (60 * 10**9) * 60)
    parts = (max(0.0, one.end - max(one.start, begin)) for one in intervals if one.category == "productive")
    return sum(parts) / (result.wall - begin) if result.wall > begin else 0.0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(acts, max_size=25), st.one_of(st.none(), st.floats(-10, 100)), st.dictionaries(st.integers(1, 5), lengths)
)
def test_the_categories_sum_to_wall_clock_to_the_nanosecond(
    script: Script, later: float | None, signs: dict[int, float]
) -> None:
    story = told(script)
    now = None if later is None else story.wall + later
    ledger = Ledger({attempt: story.wall + sign for attempt, sign in signs.items()})
    for event in story.events:
        ledger.add(event)
    check(ledger.total(now), list(ledger.intervals(now)))


@settings(max_examples=300, deadline=None)
@given(st.lists(acts, max_size=20), st.lists(damage, max_size=4))
def test_a_journal_that_came_to_harm_still_makes_an_account(script: Script, harms: Script) -> None:
    events = damaged(told(script).events, harms)
    ledger = Ledger()
    for event in events:
        ledger.add(event)
    result, intervals = ledger.total(), list(ledger.intervals())
    assert math.isfinite(result.wall) and min(result.seconds.values()) >= 0
    if result.wall < 8e6:  # beyond, seconds have no whole nanoseconds
        check(result, intervals)
    assert sum(result.seconds.values()) == pytest.approx(result.wall)
    maker = PointMaker()
    for event in events:
        maker.feed(event)
    assert maker.ledger.total() == result


@settings(max_examples=150, deadline=None)
@given(st.lists(acts, max_size=25), st.randoms(use_true_random=False))
def test_asking_in_between_changes_nothing(script: Script, chance: Any) -> None:
    events = told(script).events
    ledger = Ledger()
    for event in events:
        ledger.add(event)
        if chance.random() < 0.5:
            check(ledger.total(event["t"] + 5), list(ledger.intervals(event["t"] + 5)))
        if chance.random() < 0.5:
            check(ledger.total(), list(ledger.intervals()))
    assert ledger.total() == account(events)


@settings(max_examples=300, deadline=None)
@given(st.lists(honest_acts, max_size=30))
def test_lost_steps_are_those_redone_and_only_a_checkpoint_given_up_takes_durable_seconds(script: Script) -> None:
    """Counted independently: a list of the steps that count, from which a restart takes those it does again."""
    counting: list[int] = []
    redone = committed = newest = 0
    ledger = Ledger()
    for event in told([("start", 0.0, None, 0.0), *script]).events:
        before = ledger.total()
        ledger.add(event)
        if event["att"] < newest:
            continue
        newest, goes_on_from = event["att"], math.inf
        if event["ev"] in ("restored", "train_start"):
            goes_on_from = event["step"]
        elif event["ev"] == "steps":
            goes_on_from = event["first"] - 1
        kept = [step for step in counting if step <= goes_on_from]
        redone, counting = redone + len(counting) - len(kept), kept
        if event["ev"] == "steps":
            counting += range(event["first"], event["first"] + len(event["loss"]))
        after = ledger.total()
        assert after.steps_lost == redone
        assert after.durable_seconds >= before.durable_seconds or goes_on_from < committed
        committed = min(committed, goes_on_from)
        if event["ev"] in ("save_committed", "restored"):  # what is restored was committed, whether that is told or not
            committed = max(committed, event["step"])
    assert ledger.total().overlap_seconds < 1e-3
