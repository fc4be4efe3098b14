"""`every=auto`: the interval of a real run, what it writes down, and what the next attempt goes on from."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from framework.callback import Callback
from framework.callbacks import AsyncCheckpointCallback
from framework.callbacks.save_clock import SaveClock
from framework.callbacks.save_health import Age
from framework.distributed import World
from framework.duration import SECONDS, Duration
from framework.goodput.planning.explanation import explain, lines_of
from framework.journal import read_run
from framework.recipe import StepOutput
from framework.trainer import Trainer
from tests.loop.ranks import in_ranks
from tests.loop.runs import Crash, Fit, core, events, fit, make

STALL = 0.02
RATE = 0.01  # hours per failure: one in 36 s


class Slow(Callback):
    """Steps of 10 ms."""

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        time.sleep(0.01)


class SlowSaves(Callback):
    """Saves hold the steps up for at least 20 ms."""

    def setup(self, trainer: Trainer) -> None:
        saver = trainer.saver
        assert isinstance(saver, AsyncCheckpointCallback)
        snapshots, take = saver._writer._snapshots, saver._writer._snapshots.take

        def slow() -> Any:
            time.sleep(STALL)
            return take()

        snapshots.take = slow  # type: ignore[method-assign]


def auto(rate: float = RATE, **more: Callback) -> dict[str, Callback]:
    saver = AsyncCheckpointCallback(every="auto", failure_rate=rate, keep=None)
    callbacks = {**core(), "async_checkpoint": saver, "slow": Slow(), "slow_saves": SlowSaves(), **more}
    del callbacks["settle"]
    return callbacks


def test_the_first_save_is_measured_and_the_interval_follows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Fit(), auto(), max_steps=400)
    begin, first, *_ = events(tmp_path, "interval")
    assert (begin["bound"], begin["seconds"], begin["saves"]) == ("first", pytest.approx(0.05 * 36), [])
    assert first["before"] == begin["seconds"] and first["reason"] == "it is known now what a save costs"
    assert first["stall_seconds"] >= STALL and len(first["saves"]) == 1 and first["ranks"] == 1
    assert first["seconds"] == min(max(first["optimum"], first["shortest"]), first["longest"])
    saves = [event for event in events(tmp_path, "save_start") if event["reason"] == "interval"]
    assert len(saves) >= 2 and saves[1]["m"] - saves[0]["m"] >= 0.5 * first["seconds"]
    assert "saving every 1.8 s from now on: the attempt begins" in caplog.text
    assert "instead of every 1.8 s from now on: it is known now what a save costs" in caplog.text


def test_the_next_attempt_goes_on_from_what_was_seen(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), auto(crash=Crash(250)), max_steps=300).fit()
    fit(tmp_path, Fit(), auto(), max_steps=300)
    first = [event for event in events(tmp_path, "interval") if event["att"] == 1]
    again = next(event for event in events(tmp_path, "interval") if event["att"] == 2)
    assert (first[0]["failures"], again["failures"]) == (0, 1) and again["bound"] != "first"
    costs = [[e["stall_seconds"], e["persist_seconds"]] for e in events(tmp_path, "save_committed") if e["att"] == 1]
    assert again["saves"] == costs[-10:] != []
    (end,) = (event for event in events(tmp_path, "end") if event["att"] == 1)
    assert again["rank_hours"] == pytest.approx((end["m"] - first[0]["m"]) / 3600, rel=0.05)
    assert again["mtbf_seconds"] == pytest.approx(3600 * (RATE + again["rank_hours"]) / 2)


def train_on_two(world: World, folder: Path) -> float:
    saver = AsyncCheckpointCallback(every="auto", failure_rate=2 * RATE, keep=None)
    make(folder, Fit(), {**core(), "async_checkpoint": saver, "slow": Slow()}, max_steps=500).fit()
    return saver._clock.seconds


def test_rank_0_decides_for_all(tmp_path: Path) -> None:
    """Ranks that saved different steps would end with an error."""
    seconds = in_ranks(2, train_on_two, tmp_path)
    changes = events(tmp_path, "interval")
    assert changes[0]["ranks"] == 2 and changes[0]["mtbf_seconds"] == pytest.approx(36) and len(changes) >= 2
    assert seconds == [changes[-1]["seconds"], float("inf")]
    assert not any(event["ev"] == "interval" for event in read_run(tmp_path / "events", rank=1))
    assert [event["reason"] for event in events(tmp_path, "save_start")].count("interval") >= 2


def test_the_command_explains_a_run_and_what_auto_would_do_for_another(tmp_path: Path) -> None:
    fit(tmp_path / "auto", Fit(), auto(), max_steps=250)
    found = explain(tmp_path / "auto")
    last = events(tmp_path / "auto", "interval")[-1]
    assert found.is_auto and (found.present, found.reason) == (last["seconds"], last["reason"])
    assert (found.inputs.rate.gpu_hours, found.inputs.failures) == (RATE, 0)
    low, high = found.inputs.mtbf_bounds_seconds
    assert low < found.inputs.mtbf_seconds < high
    assert f"since step {last['step']}: {last['reason']}" in next(iter(lines_of(found)))
    fit(tmp_path / "fixed", Fit(), {**core(every=20), "slow": Slow()}, max_steps=100)
    found = explain(tmp_path / "fixed")
    assert not found.is_auto and found.present is not None and found.since_step is None
    assert found.choice.seconds > 10 * found.present and found.gain is not None and found.gain > 0
    text = "\n".join(lines_of(found))
    assert "every=auto is not in force" in text and "llama3" in text and "every=auto would save that often" in text


def test_the_clock_rings_once_and_a_new_interval_counts_from_the_last_save() -> None:
    clock = SaveClock(Duration(10.0, SECONDS))
    assert not clock.rings(1e9)
    clock.restart(100.0)
    assert [clock.rings(now) for now in (109.9, 110.0, 111.0)] == [False, True, False]
    clock.restart(111.0)
    clock.set(3.0)
    assert [clock.rings(now) for now in (113.9, 114.0)] == [False, True]
    never = SaveClock(None)
    never.restart(0.0)
    assert not never.rings(1e12)


def test_a_checkpoint_is_late_by_the_interval_in_force_and_what_a_save_takes() -> None:
    age = Age(Duration(60.0, SECONDS))
    age.begin(0, now=0.0)
    age.expect(10.0, persist_seconds=8.0)
    assert age.late(0, 22.9) is None and "one is due every 10s" in (age.late(0, 23.1) or "")
