"""The account of a run: every second once, and each with the right label."""

from __future__ import annotations

from typing import Any

import pytest
from goodput_story import Story
from hypothesis import strategies as st

from framework.goodput import Goodput, account, timeline
from framework.goodput.accounts.account import CATEGORIES


def seconds(goodput: Goodput) -> dict[str, float]:
    return {name: pytest.approx(value, abs=1e-5) for name, value in goodput.seconds.items() if value}


def test_an_unbroken_run_is_split_into_its_parts() -> None:
    story = Story().start(init=8).train(10, productive=1.0, data_wait=0.25, checkpoint=0.5).wait(2).end()
    result = account(story.events)
    assert seconds(result) == {"init": 8, "productive": 10, "data_wait": 2.5, "checkpoint": 5, "other": 2}
    assert result.wall == pytest.approx(27.5)
    assert result.ratio == pytest.approx(10 / 27.5)
    assert result.data_fetch_fraction == pytest.approx(0.2)
    assert (result.steps_done, result.steps_lost, result.attempts, result.status) == (10, 0, 1, "finished")


def test_steps_done_again_make_the_earlier_ones_lost_with_their_waits() -> None:
    story = Story().start(init=4).train(15, productive=1.0).commit().train(5, productive=1.0, data_wait=1.0)
    story.wait(30).start(init=4, restored=15, restore_seconds=2).train(25, productive=1.0).end()
    result = account(story.events)
    assert seconds(result) == {"init": 8, "productive": 40, "lost": 10 + 0, "down": 30, "restore": 2}
    assert (result.steps_done, result.steps_lost, result.attempts) == (40, 5, 2)


def test_a_run_that_starts_over_loses_everything_it_did() -> None:
    story = Story().start().train(10, productive=1.0).wait(5).start().train(10, productive=1.0).end()
    assert seconds(account(story.events)) == {"lost": 10, "down": 5, "productive": 10}


def test_steps_lost_twice_are_counted_twice_and_never_as_productive() -> None:
    story = Story().start().train(10, productive=1.0).commit().train(6, productive=1.0)
    story.start(restored=10).train(4, productive=1.0).start(restored=10).train(2, productive=1.0)
    result = account(story.events)
    assert seconds(result) == {"productive": 12, "lost": 10}
    assert result.steps_lost == 10


def test_going_back_inside_an_attempt_loses_the_steps_too() -> None:
    story = Story().start().train(10, productive=1.0).event("restored", step=4, seconds=0.0)
    story.step = 4
    story.train(3, productive=1.0).end()
    assert seconds(account(story.events)) == {"productive": 7, "lost": 6}


def test_the_unlogged_tail_of_a_killed_attempt_is_lost_if_it_is_done_again() -> None:
    story = Story().start().train(10, productive=1.0).train(4, flush=False, productive=1.0)
    alive = {1: story.wall}
    killed = account(story.events, alive=alive)
    assert seconds(killed) == {"productive": 10, "down": 4}, "nothing restored yet"
    story.wait(20).start(init=3, restored=5).train(5, productive=1.0).end()
    assert seconds(account(story.events, alive=alive)) == {"productive": 10, "lost": 5 + 4, "down": 20, "init": 3}
    assert seconds(account(story.events)) == {"productive": 10, "lost": 5, "down": 24, "init": 3}, "no sign of life"


def test_a_failure_charges_the_step_in_flight_then_detection_then_the_outage() -> None:
    story = Story().start().train(10, productive=1.0).wait(61).event("failure", type="E", message="m", step=10)
    story.wait(2).end("failed", 1).wait(7).start(restored=10).train(1, productive=1.0).end()
    assert seconds(account(story.events)) == {"productive": 11, "lost": 1, "detect": 60, "down": 9}


def test_dying_before_the_first_step_is_init_then_down() -> None:
    story = Story().start().train(5, productive=1.0).commit().wait(1)
    story.attempt += 1
    story.event("attempt_start", started=story.wall, boot_id=story.boot).wait(3).event("failure", type="E", message="m")
    story.end("failed", 1).wait(10).start(restored=5).train(5, productive=1.0).end()
    assert seconds(account(story.events)) == {"productive": 10, "init": 3, "down": 11}


def test_time_until_the_machines_were_given_again_is_queue() -> None:
    def tell(**facts: float) -> dict[str, float]:
        story = Story().start().train(30, productive=1.0).commit().wait(3).end("killed", 75).wait(100)
        given = story.wall
        story.wait(20).launch(5, allocated=given + facts["late"]).event("train_start", step=30)
        return seconds(account(story.train(30, productive=1.0).end().events))

    usual = {"productive": 60, "other": 3, "init": 5}
    assert tell(late=0.0) == usual | {"queue": 100, "down": 20}
    assert tell(late=-1000.0) == usual | {"down": 120}, "the same machines as before"
    assert tell(late=1000.0) == usual | {"queue": 120}, "by another clock"


def test_after_a_kill_the_queue_begins_where_the_attempt_was_last_seen() -> None:
    story = Story().start().train(30, productive=1.0).train(4, flush=False, productive=1.0)
    alive = {1: story.wall}
    story.wait(100).launch(allocated=story.wall - 10).event("restored", step=20, seconds=0.0)
    story.event("train_start", step=20)
    found = account(story.train(30, productive=1.0).end().events, alive=alive)
    assert seconds(found) == {"productive": 50, "lost": 10 + 4, "queue": 90, "down": 10}
    assert found.runtime == pytest.approx(50 / 74)


def test_what_other_ranks_noticed_tells_detection_from_the_outage() -> None:
    def tell(restored: int, alive: float | None, noticed: float | None) -> dict[str, float]:
        story = Story().start().train(30, productive=1.0).commit()
        killed = story.wall
        signs = {"attempt": 1, "alive": alive and killed + alive, "noticed": noticed and killed + noticed}
        story.wait(100).launch(previous=signs).event("restored", step=restored, seconds=0.0)
        story.step = restored
        return seconds(account(story.event("train_start", step=restored).train(30, productive=1.0).end().events))

    assert tell(30, None, None) == {"productive": 60, "down": 100}
    assert tell(30, None, 40) == {"productive": 60, "detect": 40, "down": 60}
    assert tell(20, 5, 40) == {"productive": 50, "lost": 10 + 5, "detect": 35, "down": 60}
    assert tell(20, 40, 5) == {"productive": 50, "lost": 10 + 5, "down": 95}, "rank 0 hung after another had failed"
    assert tell(20, 40, None) == {"productive": 50, "lost": 10 + 40, "down": 60}
    assert tell(20, None, 1000) == {"productive": 50, "lost": 10, "detect": 100}


def test_a_gap_inside_an_attempt_is_other_and_after_a_finished_run_it_is_a_pause() -> None:
    story = Story().start().train(5, productive=1.0).wait(3).train(5, productive=1.0).end()
    story.wait(100).start(restored=10).train(5, productive=1.0).end()
    assert seconds(account(story.events)) == {"productive": 15, "other": 3, "paused": 100}


def test_warm_up_is_what_the_first_five_steps_took_beyond_the_usual() -> None:
    times = [9.0, 2.0, 1.0, 1.0, 0.5] + [1.0] * 20
    story = Story().start().train(24, productive=times[:24])
    assert "warmup" not in seconds(account(story.events)), "24 steps do not tell what is usual"
    story.train(1, productive=1.0)
    assert seconds(account(story.events)) == {"warmup": 9, "productive": 24.5}
    intervals = timeline(story.events)
    assert [(i.category, i.first, i.last) for i in intervals] == [
        ("warmup", 1, 1), ("productive", 1, 1), ("warmup", 2, 2), ("productive", 2, 25),
    ]  # fmt: skip


def test_a_phase_written_before_the_steps_that_came_first_is_put_in_its_place() -> None:
    story = Story().start()
    begin = story.wall
    story.wait(7).event("phase", name="checkpoint", start=story.wall - 2, seconds=2.0)
    story.event("steps", first=1, start=begin, seconds={"productive": [5.0]}, loss=[1.0], lr=[1.0]).end()
    result = account(story.events)
    assert seconds(result) == {"productive": 5, "checkpoint": 2}
    assert result.overlap_seconds == 0


def test_records_that_claim_more_time_than_passed_are_reported_not_hidden() -> None:
    story = Story().start().wait(4)
    story.event("steps", first=1, start=story.wall - 4, seconds={"productive": [3.0, 3.0]}, loss=[1.0, 1.0]).end()
    result = account(story.events)
    assert (result.wall, result.overlap_seconds) == (pytest.approx(4), pytest.approx(2, abs=1e-5))
    assert seconds(result) == {"productive": 4}


@pytest.mark.parametrize("jump", [-3600.0, -0.3, 0.3, 3600.0, 1e8])
def test_setting_the_clock_moves_nothing(jump: float) -> None:
    def tell(jump: float) -> Goodput:
        story = Story().start(init=2).train(10, productive=1.0).wait(1).train(5, productive=1.0)
        begin = story.wall
        story.wait(4).set_clock(jump).wait(2)  # in the middle of a block of steps
        story.event("steps", first=16, start=begin, seconds={"productive": [3.0, 3.0]}, loss=[1.0, 1.0])
        story.step = 17
        story.train(3, data_wait=1.0).set_clock(-jump / 2).wait(6).start(restored=20).set_clock(jump)
        return account(story.train(5, productive=1.0).end().events)

    assert seconds(tell(jump)) == seconds(tell(0.0))
    assert tell(jump).wall == pytest.approx(tell(0.0).wall, abs=1e-5)


def test_another_host_whose_clock_is_behind_costs_no_negative_time() -> None:
    story = Story().start().train(5, productive=1.0).commit().wait(1).reboot().set_clock(-50)
    result = account(story.start(restored=5).train(5, productive=1.0).end().events)
    assert seconds(result) == {"productive": 10}
    assert result.clock_skew_seconds == pytest.approx(49)


def test_a_live_run_reaches_to_now_and_a_finished_one_does_not() -> None:
    story = Story().start().train(5, productive=1.0)
    assert account(story.events, now=story.wall + 3).wall == pytest.approx(8)
    assert seconds(account(story.events, now=story.wall + 3)) == {"productive": 5, "other": 3}
    story.end()
    assert account(story.events, now=story.wall + 3).wall == pytest.approx(5)


def test_only_committed_steps_are_durable_and_a_restart_takes_nothing_back() -> None:
    story = Story().start().train(30, productive=1.0)
    assert account(story.events).durable_seconds == 0
    story.commit().train(8, productive=1.0)
    story.wait(2)
    before = account(story.events)
    assert (before.durable_seconds, before.committed_step) == (pytest.approx(30), 30)
    after = account(story.start(restored=30).train(3, productive=1.0).events)
    assert after.durable_seconds == pytest.approx(30)
    assert after.ratio_durable == pytest.approx(30 / 43)
    assert account(story.commit().end().events).durable_seconds == pytest.approx(33)


@pytest.mark.parametrize("ending", ["train", "end", "start"])
def test_first_steps_are_durable_once_their_warm_up_is_known(ending: str) -> None:
    story = Story().start().train(8, productive=[9.0] + [1.0] * 7).commit()
    assert account(story.events).durable_seconds == pytest.approx(3), "the first 5 may be warm-up in part"
    match ending:
        case "train":
            story.train(16, productive=1.0)
            assert account(story.events).durable_seconds == pytest.approx(3)
            story.train(1, productive=1.0)
            assert account(story.events).durable_seconds == pytest.approx(8)
        case "end":
            assert account(story.end().events).durable_seconds == pytest.approx(16)
        case "start":
            assert account(story.start(restored=8).events).durable_seconds == pytest.approx(16)


def test_a_commit_that_the_journal_missed_is_known_from_the_restore() -> None:
    story = Story().start().train(10, productive=1.0).start(restored=10).train(1, productive=1.0)
    assert account(story.events).durable_seconds == pytest.approx(10)


def test_checkpoint_age_counts_from_the_captured_state() -> None:
    story = Story().start().train(10, productive=1.0).wait(4).commit(stall=0.5, persist=4.0)
    story.step = 10
    result = account(story.wait(3).train(2, productive=1.0).events)
    assert (result.checkpoint_stall, result.checkpoint_persist) == (0.5, 4.0)
    assert result.checkpoint_age == pytest.approx(9)
    assert (result.checkpoint_interval, result.age_over_interval) == (None, None), "one save tells no interval"
    story.commit()
    assert account(story.events).checkpoint_interval == pytest.approx(9), "as far as the states were apart"
    story.event("save_committed", step=12, captured=story.wall, interval_seconds=4.0).wait(6).end()
    assert account(story.events).age_over_interval == pytest.approx(1.5)


def test_windows_are_of_the_last_hour_and_day() -> None:
    story = Story().start()
    for part in (20.0, 45.0) * 13:  # minutes of work in each hour; 26 h, the last hour had 45
        story.train(int(part), productive=60.0).wait(3600 - 60 * part)
    result = account(story.event("metrics", step=1).events)
    assert result.wall == pytest.approx(26 * 3600)
    assert result.window_1h == pytest.approx(0.75)
    assert result.window_24h == pytest.approx((20 + 45) / 120)
    story.start().event("end", status="failed")  # from step 0: everything is lost
    assert account(story.events).window_24h == 0


def test_a_window_holds_a_step_that_took_hours() -> None:
    story = Story().start().train(1, productive=7200.0).wait(1800).end()
    result = account(story.events)
    assert (result.window_1h, result.window_24h) == (pytest.approx(0.5), pytest.approx(0.8))


def test_runtime_leaves_out_the_time_without_machines() -> None:
    story = Story().start().train(30, productive=1.0).wait(30).end()
    story.wait(100).start(restored=30).train(30, productive=1.0).end()
    result = account(story.events)
    assert (result.ratio, result.runtime) == (pytest.approx(60 / 190), pytest.approx(60 / 90))
    assert result.rank_hours == pytest.approx(90 / 3600)


def test_fewer_ranks_than_the_most_count_for_less() -> None:
    story = Story().on(8).start().train(60, productive=1.0).wait(20)
    story.on(4).start(restored=60).train(30, productive=1.0).end()
    result = account(story.events)
    assert result.ratio == pytest.approx(90 / 110)
    assert result.capacity == pytest.approx((60 * 8 + 30 * 4) / (110 * 8))
    assert result.rank_hours == pytest.approx((80 * 8 + 30 * 4) / 3600)
    assert result.rank_hours_productive == pytest.approx((60 * 8 + 30 * 4) / 3600)


def test_without_lengths_of_steps_the_run_is_not_measured_but_still_sums() -> None:
    story = Story().start(init=3).wait(5).event("steps", first=1, loss=[1.0, 0.9], lr=[0.1, 0.1]).end()
    result = account(story.events)
    assert not result.is_measured
    assert seconds(result) == {"init": 3, "other": 5}
    assert result.steps_done == 2


def test_an_empty_journal_is_an_empty_account() -> None:
    assert account([]).wall == 0
    assert timeline([]) == []


# -- what random stories are made of

lengths = st.one_of(st.just(0.0), st.floats(0, 0.01), st.floats(0, 30))
columns = st.dictionaries(st.sampled_from([*CATEGORIES, "unheard_of"]), lengths, max_size=4)
acts = st.one_of(
    st.tuples(st.just("wait"), st.floats(0, 100)),
    st.tuples(st.just("clock"), st.floats(-5000, 5000)),
    st.tuples(st.just("train"), st.integers(1, 30), columns, st.booleans()),
    st.tuples(st.just("lie"), st.integers(0, 40), st.floats(-50, 50), columns),  # records that do not fit
    st.tuples(st.just("phase"), st.sampled_from(CATEGORIES), st.floats(-20, 5), lengths),
    st.tuples(st.just("commit"), st.floats(0, 20)),
    st.tuples(st.just("restored"), st.integers(0, 60), lengths),
    st.tuples(st.just("failure")),
    st.tuples(st.just("end"), st.sampled_from(["finished", "stopped", "failed", "killed"])),
    st.tuples(st.just("start"), st.floats(0, 20), st.one_of(st.none(), st.integers(0, 60)), lengths),
    st.tuples(st.just("begin")),
    st.tuples(st.just("on"), st.integers(1, 8)),
    st.tuples(st.just("found"), *[st.one_of(st.none(), st.floats(-50, 200))] * 3),
    st.tuples(st.just("reboot")),
)


def perform(story: Story, act: tuple[Any, ...]) -> None:
    match act:
        case ("wait", pause):
            story.wait(pause)
        case ("clock", jump):
            story.set_clock(jump)
        case ("train", count, parts, flush):
            story.train(count, flush, **parts)
        case ("lie", first, offset, parts):
            story.event("steps", first=first, start=story.wall + offset, seconds={k: [v, v] for k, v in parts.items()})
        case ("phase", name, offset, length):
            story.event("phase", name=name, start=story.wall + offset, seconds=length)
        case ("commit", persist):
            story.commit(persist=persist)
        case ("restored", step, length):
            story.step = step
            story.event("restored", step=step, seconds=length)
        case ("failure",):
            story.event("failure", type="E", message="m", step=story.step)
        case ("end", status):
            story.end(status)
        case ("start", init, restored, length):
            story.start(init=init, restored=restored, restore_seconds=length)
        case ("found", *times):
            allocated, alive, noticed = (None if time is None else story.wall + time for time in times)
            story.launch(allocated=allocated, previous={"attempt": story.attempt, "alive": alive, "noticed": noticed})
        case ("on", ranks):
            story.on(ranks)
        case ("begin",):
            story.attempt += 1
            story.event("attempt_start", started=story.wall - 1, boot_id=story.boot)
        case ("reboot",):
            story.reboot()


def test_steps_that_were_done_and_never_logged_are_lost_if_the_next_attempt_found_their_mark() -> None:
    story = Story().start().train(10, productive=1.0).commit().train(4, flush=False, productive=1.0)
    found = {"attempt": 1, "step": 14, "alive": story.wall, "noticed": None}
    story.wait(20).launch(previous=found).event("restored", step=5, seconds=0.0).event("train_start", step=5)
    # killed before its first step: the next one finds no mark of it, and what was said of the first stands
    found = {"attempt": 2, "step": None, "alive": None, "noticed": None}
    story.wait(3).launch(previous=found).event("restored", step=5, seconds=0.0).event("train_start", step=5)
    story.step = 5
    story.train(9, productive=1.0).end()
    result = account(story.events)
    assert (result.steps_done, result.steps_lost) == (14, 5 + 4)
    assert seconds(result) == {"productive": 14, "lost": 5 + 4, "down": 20 + 3}


@pytest.mark.parametrize(
    "found", [None, 7, {}, {"attempt": 1}, {"attempt": 9, "step": 90}, {"attempt": 1, "step": 1.5}, {"step": 14}]
)
def test_a_mark_that_is_none_counts_for_nothing(found: object) -> None:
    story = Story().start().train(10, productive=1.0).wait(20).launch(previous=found).event("train_start", step=8)
    story.step = 8
    story.train(2, productive=1.0).end()
    assert account(story.events).steps_lost == 2
