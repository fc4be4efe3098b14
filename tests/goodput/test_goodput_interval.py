"""How often to save: bounds, what moves an interval and what does not, and what an attempt goes on from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from goodput_story import Story
from hypothesis import given, settings
from hypothesis import strategies as st
from interval_drill import drill, stratified

from framework.goodput.planning import observed
from framework.goodput.planning.formulas import daly
from framework.goodput.planning.interval import HYSTERESIS, AutoInterval, choose, is_change, p90
from framework.goodput.planning.observed import Observed, SaveCost, observe, seen_before
from framework.goodput.planning.rates import parse_rate

COSTS = st.floats(1e-4, 1e4)
MEANS = st.floats(1.0, 1e8)


@settings(deadline=None)
@given(COSTS, COSTS, MEANS)
def test_an_interval_is_never_shorter_than_a_save_takes_and_never_costs_more_than_3_percent(
    stall: float, persist: float, mtbf: float
) -> None:
    choice = choose(stall, persist, mtbf)
    assert choice.seconds >= 1.2 * persist and stall <= 0.03 * choice.seconds * (1 + 1e-9)
    assert choice.shortest <= choice.seconds <= choice.longest
    assert choice.seconds <= 3600 or choice.seconds == choice.shortest


@settings(deadline=None)
@given(COSTS, COSTS, MEANS, st.floats(1.0, 100.0))
def test_an_interval_is_longer_the_rarer_failures_are_and_the_more_a_save_costs(
    stall: float, persist: float, mtbf: float, factor: float
) -> None:
    seconds = choose(stall, persist, mtbf).seconds
    assert choose(stall, persist, factor * mtbf).seconds >= seconds
    assert choose(factor * stall, persist, mtbf).seconds >= seconds
    assert choose(stall, factor * persist, mtbf).seconds >= seconds


@settings(deadline=None)
@given(st.floats(1e-3, 60.0), st.floats(60.0, 1e7))
def test_between_its_bounds_it_is_the_optimum_of_the_formula(stall: float, mtbf: float) -> None:
    choice = choose(stall, 0.0, mtbf)
    if choice.bound == "optimum":
        assert choice.seconds == choice.optimum == pytest.approx(daly(stall, mtbf))
    else:
        assert choice.optimum is not None and not choice.shortest < choice.optimum < choice.longest


@pytest.mark.parametrize(
    ("stall", "persist", "mtbf", "bound", "seconds"),
    [
        (0.2, 5.0, 36_000.0, "optimum", 119.8),
        (0.2, 600.0, 36_000.0, "persist", 720.0),
        (15.0, 30.0, 600.0, "stall", 500.0),
        (15.0, 30.0, 3.6e6, "longest", 3600.0),
        (15.0, 6000.0, 3.6e6, "persist", 7200.0),
        (1e-6, 1e-3, 10.0, "shortest", 0.1),
        (0.0, 1.0, 36_000.0, "persist", 1.2),
        (None, None, 36_000.0, "first", 60.0),
        (None, None, 40.0, "first", 2.0),
    ],
)
def test_what_bounds_it_is_named(stall: Any, persist: Any, mtbf: float, bound: str, seconds: float) -> None:
    choice = choose(stall, persist, mtbf)
    assert (choice.bound, choice.seconds) == (bound, pytest.approx(seconds, rel=0.01))


def test_the_quantile_passes_over_one_save_in_ten() -> None:
    assert p90([0.1] * 9 + [50.0]) == 0.1 and p90([0.1] * 8 + [50.0] * 2) == 50.0
    assert p90([3.0]) == 3.0 and p90([]) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 20.0), st.floats(0.01, 60.0), st.floats(60.0, 1e6))
def test_noise_does_not_move_it(seed: int, stall: float, persist: float, mtbf: float) -> None:
    """Costs that vary by 9 % both ways: the interval is found once."""
    chance = random.Random(seed)
    auto = AutoInterval(parse_rate(mtbf / 3600), 1, Observed(), 0.0)
    changes = sum(
        auto.committed(stall * chance.uniform(0.91, 1.09), persist * chance.uniform(0.91, 1.09), 0.0) is not None
        for _ in range(100)
    )
    assert changes <= 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 30.0), st.floats(1e-3, 300.0)), min_size=1, max_size=40), MEANS)
def test_whatever_saves_cost_the_one_in_force_is_within_bounds_and_near_the_best(
    costs: list[tuple[float, float]], mtbf: float
) -> None:
    auto, now = AutoInterval(parse_rate(mtbf / 3600), 1, Observed(), 0.0), 0.0
    for number, (stall, persist) in enumerate(costs):
        now += auto.seconds
        auto.committed(stall, persist, now)
        last = [SaveCost(*one) for one in costs[max(0, number - 9) : number + 1]]
        slow, durable = p90([one.stall for one in last]), p90([one.persist for one in last])
        assert slow is not None and durable is not None
        best = choose(slow, durable, mtbf + now).seconds
        assert auto.seconds >= durable
        assert best / HYSTERESIS * (1 - 1e-9) <= auto.seconds <= best * HYSTERESIS * (1 + 1e-9)


def test_a_persist_that_outgrows_the_interval_moves_it_at_once() -> None:
    choice = choose(0.2, 110.0, 36_000.0)
    assert choice.bound == "persist" and is_change(108.0, choice, 110.0) and not is_change(112.0, choice, 110.0)


def test_each_change_says_why() -> None:
    auto = AutoInterval(parse_rate(100.0), 10, Observed(), 0.0)
    reasons = [auto.change.reason]

    def saves(stall: float, persist: float, now: float) -> None:
        for _ in range(10):
            change = auto.committed(stall, persist, now)
            if change is not None:
                reasons.append(change.reason)

    saves(0.2, 5.0, 60.0)
    saves(0.8, 5.0, 600.0)
    saves(0.8, 900.0, 6000.0)
    saves(0.8, 5.0, 6100.0)
    saves(0.8, 5.0, 60_000.0)
    assert reasons == [
        "the attempt begins, with 0 failures so far, and what a save costs is not known yet",
        "it is known now what a save costs",
        "a save holds the steps up for 0.8 s, 0.2 s before",
        "a save takes 900 s to be durable, 5 s before",
        "a save takes 5 s to be durable, 900 s before",
        "no failure in 150 more rank-hours",
    ]


# -- what was observed -------------------------------------------------------------------------------------------------


def told() -> Story:
    """Four attempts of 100 s: killed, failed, preempted, finished; one more died before it trained."""
    story = Story().start(init=3).train(100, productive=1.0).commit(0.1, 2.0)
    story.wait(50).start(init=3).train(100, productive=1.0).commit(0.2, 3.0)
    story.event("failure", type="RuntimeError", message="boom", step=200).end("failed", 1)
    story.wait(50).start(init=3).train(100, productive=1.0).commit(0.3, 4.0).end("killed", 75)
    story.attempt += 1
    story.event("attempt_start", attempt=story.attempt, world_size=1).wait(5)
    return story.start(init=3).train(100, productive=1.0).commit(0.4, 5.0).end()


def test_failures_are_attempts_that_trained_and_lost_what_they_did() -> None:
    seen = observe(told().events)
    assert (seen.failures, seen.rank_hours) == (2, pytest.approx(400 / 3600))
    assert seen.saves == (SaveCost(0.1, 2.0), SaveCost(0.2, 3.0), SaveCost(0.3, 4.0), SaveCost(0.4, 5.0))


def test_an_attempt_that_still_runs_has_not_failed() -> None:
    story = Story().start().train(100, productive=1.0)
    assert observe(story.events).failures == 1 and observe(story.events, live=1).failures == 0


def test_a_run_that_stumbles_over_the_same_step_again_and_again_has_failed_once() -> None:
    story = Story()
    for step in (50, 50, 50, 70):
        story.start().train(10, productive=1.0).event("failure", type="ValueError", message="bad sample", step=step)
        story.end("failed", 1)
    assert observe(story.events).failures == 2


def test_time_counts_for_every_rank() -> None:
    story = Story().start().train(3600, productive=1.0)
    story.events[0]["world_size"] = 8
    assert observe(story.events).rank_hours == pytest.approx(8)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["ev", "att", "m", "failures", "saves", "rank_hours"]), st.one_of(
    st.none(), st.integers(-2, 3), st.floats(), st.lists(st.lists(st.one_of(st.none(), st.floats()), max_size=3)),
    st.sampled_from(["attempt_start", "train_start", "interval", "save_committed", "failure", "end"])))))  # fmt: skip
def test_damaged_events_stop_nothing(events: list[dict[str, Any]]) -> None:
    seen = observe(events)
    assert seen.failures >= 0 and seen.rank_hours >= 0 and len(seen.saves) <= observed.NUM_SAVES


def write(story: Story, folder: Path) -> Path:
    for attempt in {event["att"] for event in story.events}:
        file = folder / f"att-{attempt:04d}" / "rank0.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(event) + "\n" for event in story.events if event["att"] == attempt))
    return folder


def test_the_next_attempt_knows_what_a_reader_of_the_whole_journal_knows(tmp_path: Path) -> None:
    story = told()
    write(story, tmp_path)
    assert seen_before(tmp_path, 6) == observe(story.events)
    assert seen_before(tmp_path, 1) == Observed() == seen_before(tmp_path / "none", 9)


def test_the_next_attempt_reads_back_to_the_last_interval_event_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = told().start()
    seen = observe(event for event in story.events if event["att"] < 6)
    auto = AutoInterval(parse_rate("llama3"), 1, seen, story.monotonic)
    story.event("interval", **auto.change.to_json()).train(3000, productive=1.0).commit(0.5, 6.0)
    expected = observe(story.events)
    assert (expected.failures, len(expected.saves)) == (3, 5)
    for attempt in range(1, 6):
        (tmp_path / f"att-{attempt:04d}").mkdir()
    last = Story()
    last.events = [event for event in story.events if event["att"] == 6]
    write(last, tmp_path)
    monkeypatch.setattr(observed, "TAIL_BYTES", 1000)  # the end of the file, in which the steps are not
    monkeypatch.setattr(observed, "HEAD_BYTES", 3000)
    assert seen_before(tmp_path, 7) == expected


# -- the drill on a clock of its own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("belief", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("mtbf", [600.0, 7200.0])
def test_auto_settles_at_the_optimum_and_beats_intervals_4_times_off(mtbf: float, belief: float) -> None:
    stall, persist = 0.5, 4.0
    optimum = daly(stall, mtbf)
    for seed in range(3):
        lives = stratified(mtbf, 100, random.Random(seed))
        auto = drill(lives, stall, persist, rate=parse_rate(belief * mtbf / 3600), seed=seed)
        others = [drill(lives, stall, persist, fixed=factor * optimum, seed=seed).goodput for factor in (0.25, 1, 4)]
        assert 0.75 <= auto.seconds / optimum <= 1.25
        assert auto.goodput > others[0] and auto.goodput > others[2] and auto.goodput > others[1] - 0.01
        assert auto.seen.failures == 100
        assert auto.seen.rank_hours == pytest.approx(sum(lives) / 3600)
