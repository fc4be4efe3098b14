"""Where time goes: laps without gaps, and the log of the steps."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from framework.callback import Callback
from framework.callbacks import GoodputMeterCallback
from framework.checkpoint import SaveResult
from framework.distributed import World
from framework.journal import Journal, read_file
from framework.loop import steplog
from framework.loop.meter import CHECKPOINT, DATA_WAIT, PRODUCTIVE, DataWait, LapMeter, Meter, timing_event
from framework.loop.steplog import StepLog
from framework.stepmark import StepMark
from framework.trainer import Trainer
from tests.loop.ranks import in_ranks
from tests.loop.runs import Fit, Points, by_step, core, events, fit, make, saved_steps


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_laps_leave_no_gap_and_charge_each_instant_once() -> None:
    clock = Clock()
    meter = LapMeter(clock)
    clock.now += 5
    meter.begin()
    laps = [(DATA_WAIT, 1), (PRODUCTIVE, 2), (DATA_WAIT, 4), (CHECKPOINT, 8)]
    for category, seconds in laps:
        clock.now += seconds
        meter.lap(category)
    assert meter.take() == laps
    assert meter.take() == []
    clock.now += 3
    meter.lap(PRODUCTIVE)
    assert meter.take() == [(PRODUCTIVE, 3)]


def test_nobody_measuring_measures_nothing() -> None:
    meter = Meter()
    meter.begin()
    meter.lap(PRODUCTIVE)
    assert meter.take() == [] and not meter.is_on


def step(log: StepLog, number: int, meter: Meter) -> None:
    log.add(torch.tensor(float(number)), 0.1 * number, {"norm": torch.tensor(number / 2)} if number % 2 else {})
    log.end_step(meter)


def test_steps_are_written_in_batches_and_before_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steplog, "FLUSH_STEPS", 3)
    journal = Journal(tmp_path / "j.jsonl", 1)
    log = StepLog(journal, StepMark(None))
    log.begin(10)
    for number in (11, 12, 13, 14):
        step(log, number, Meter())
    (first,) = read_file(tmp_path / "j.jsonl")
    assert (first["first"], first["loss"], first["skipped"]) == (11, [11.0, 12.0, 13.0], [])
    assert first["lr"] == pytest.approx([1.1, 1.2, 1.3])
    assert first["metrics"] == {"norm": [5.5, None, 6.5]} and first["seconds"] == {}
    assert log.last_loss == 13.0
    log.skipped(14)
    log.flush(Meter())
    log.flush(Meter())
    _, second = read_file(tmp_path / "j.jsonl")
    assert (second["first"], second["loss"], second["skipped"]) == (14, [14.0], [14])


def test_time_that_belongs_to_no_step_is_a_phase(tmp_path: Path) -> None:
    clock = Clock()
    meter = LapMeter(clock)
    journal = Journal(tmp_path / "j.jsonl", 1)
    log = StepLog(journal, StepMark(None))
    log.begin(0)
    log.add(torch.tensor(1.0), 0.1, {})
    clock.now += 2
    meter.lap(PRODUCTIVE)
    log.flush(meter)  # in mid-step, as before a save
    clock.now += 3
    meter.lap("checkpoint")
    log.end_step(meter)
    steps, phase = read_file(tmp_path / "j.jsonl")
    assert steps["seconds"] == {PRODUCTIVE: [2.0]} and (phase["ev"], phase["name"], phase["seconds"]) == (
        "phase",
        "checkpoint",
        3.0,
    )


def test_a_rank_without_a_journal_keeps_no_records() -> None:
    log = StepLog(None, StepMark(None))
    log.begin(0)
    step(log, 1, Meter())
    log.flush(Meter())
    assert math.isnan(log.last_loss)


class Slow(Callback):
    def step_end(self, trainer: Trainer, output: object) -> None:
        time.sleep(0.01)


def test_the_seconds_of_a_run_sum_to_the_time_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    began, ended = [], []

    class Span(Callback):
        def step_start(self, trainer: Trainer) -> None:
            began.append(trainer.meter._last if not began else 0)  # type: ignore[attr-defined]

        def train_end(self, trainer: Trainer, status: str) -> None:
            ended.append(trainer.meter._last)  # type: ignore[attr-defined]

    callbacks = core(every=3, goodput=GoodputMeterCallback(), span=Span(), slow=Slow())
    fit(tmp_path, Fit(eval_data=lambda: Points(16)), callbacks, eval_every=4)
    records = [
        seconds for event in events(tmp_path, "steps") for column in event["seconds"].values() for seconds in column
    ]
    phases = [event["seconds"] for event in events(tmp_path, "phase")]
    assert sum(records) + sum(phases) == pytest.approx(ended[0] - began[0], abs=1e-4)  # rounding of 12 steps
    for event in events(tmp_path, "steps"):
        assert all(len(column) == len(event["loss"]) for column in event["seconds"].values())
    names = {name for event in events(tmp_path, "steps") for name in event["seconds"]}
    assert {PRODUCTIVE, DATA_WAIT, "evaluation"} <= names and sum(records) > 12 * 0.01


class Kill(Callback):
    """Kills the process as soon as a checkpoint of a step is committed."""

    def save_committed(self, trainer: Trainer, result: SaveResult) -> None:
        if result.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(world: World, folder: str) -> None:
    make(Path(folder), Fit(), core(kill=Kill())).fit()


def test_losses_of_committed_steps_are_in_the_log_after_a_kill(tmp_path: Path) -> None:
    assert in_ranks(1, train_until_killed, str(tmp_path), dies=True) == [-signal.SIGKILL]
    assert saved_steps(tmp_path) == [4, 8]
    fit(tmp_path.parent / "whole")
    whole = by_step(tmp_path.parent / "whole")
    logged = by_step(tmp_path)
    assert [logged[step] for step in range(1, 9)] == [whole[step] for step in range(1, 9)]
    fit(tmp_path)
    assert by_step(tmp_path) == whole
    assert [event["attempt"] for event in events(tmp_path, "attempt_start")] == [1, 2]


def test_every_step_is_logged_once_and_in_order(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=250, callbacks=core(every=70))
    logged = [
        number
        for event in events(tmp_path, "steps")
        for number in range(event["first"], event["first"] + len(event["loss"]))
    ]
    assert logged == list(range(1, 251))
    at_save = [event["first"] + len(event["loss"]) - 1 for event in events(tmp_path, "steps")]
    assert {70, 140, 210, 250} <= set(at_save)


class Device:
    """A device that works off what is queued on it, by the same clock as the host; times in seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.busy_until = 0.0

    def queue(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.clock.now) + seconds

    def event(self) -> DeviceEvent:
        return DeviceEvent(self)


class DeviceEvent:
    """As `torch.cuda.Event` with timing: passed when all that was queued before it is done."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self._device.busy_until, self._device.clock.now)

    def query(self) -> bool:
        return self._device.clock.now >= self.at

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        return 1e3 * (end_event.at - self.at)


@pytest.mark.parametrize(
    ("queued", "waits", "data_wait"),
    [
        (0.0, 2.0, 2.0),  # the device had nothing left: all of the wait is one
        (5.0, 2.0, 0.0),  # it computed all the while
        (0.5, 2.0, 1.5),  # it was done before the batch came
    ],
)
def test_a_wait_for_data_in_which_the_device_still_computed_is_none(
    tmp_path: Path, queued: float, waits: float, data_wait: float
) -> None:
    clock = Clock()
    device = Device(clock)
    meter = LapMeter(clock, device.event)
    journal = Journal(tmp_path / "log.jsonl", 1)
    log = StepLog(journal, StepMark(None))
    meter.begin()
    log.begin(0)
    for _ in range(3):
        clock.now += waits
        meter.lap(DATA_WAIT)
        clock.now += 0.25  # of queueing
        device.queue(queued)
        log.add(torch.tensor(0.5), 0.1, {})
        meter.lap(PRODUCTIVE)
        log.end_step(meter)
    clock.now += 100  # what is written late has been passed by the device
    log.flush(meter)
    journal.close()
    [record] = [event for event in read_file(tmp_path / "log.jsonl") if event["ev"] == "steps"]
    # before the first step nothing was queued that could have been waited for
    assert record["seconds"][DATA_WAIT] == pytest.approx([waits, data_wait, data_wait])
    assert record["seconds"][PRODUCTIVE] == pytest.approx([0.25] + 2 * [0.25 + waits - data_wait])


def test_what_the_device_has_not_passed_yet_is_not_waited_for() -> None:
    clock = Clock()
    device = Device(clock)
    meter = LapMeter(clock, device.event)
    meter.begin()
    meter.lap(PRODUCTIVE)
    device.queue(60.0)
    clock.now += 2.0
    meter.lap(DATA_WAIT)
    [_, (_, wait)] = meter.take()
    assert isinstance(wait, DataWait) and wait == 2.0 and wait.idle_seconds() == 2.0
    clock.now += 100.0
    assert wait.idle_seconds() == 2.0  # the 60 s were queued behind the event with which the wait began


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_a_wait_on_a_gpu_that_computes_is_none() -> None:
    left = torch.randn(8192, 8192, device="cuda")
    meter = LapMeter(event=timing_event)
    for _ in range(2):
        for _ in range(20):
            left @ left
        meter.lap(PRODUCTIVE)
        time.sleep(0.001)
        meter.lap(DATA_WAIT)
    torch.cuda.synchronize()
    time.sleep(0.2)
    meter.lap(DATA_WAIT)
    waits = [wait for category, wait in meter.take() if category == DATA_WAIT]
    assert all(isinstance(wait, DataWait) for wait in waits)
    torch.cuda.synchronize()
    assert [wait.idle_seconds() > 0.1 for wait in waits if isinstance(wait, DataWait)] == [False, False, True]
