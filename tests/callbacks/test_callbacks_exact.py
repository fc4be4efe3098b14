"""Each of the named callbacks does what it says, and only that is lost without it."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from framework import callbacks as package
from framework.callback import Callback
from framework.callbacks import (
    GoodputMeterCallback,
    PreemptionCallback,
    ProgressCallback,
)
from framework.errors import EXIT_REQUEUE, EXIT_SIGINT, EXIT_SIGTERM, ConfigError
from framework.recipe import StepOutput
from framework.trainer import Trainer
from tests.loop.runs import (
    Crash,
    Fit,
    Points,
    assert_same,
    by_step,
    core,
    events,
    fit,
    flat,
    make,
    saved_steps,
)

PROMISES = ("AutoResumeCallback", "RNGStateCallback", "DataPositionCallback", "AsyncCheckpointCallback")


class Draws(Fit):
    """Draws from every generator there is in each step: the process's three and three of its own."""

    def __init__(self, **factories: Any) -> None:
        super().__init__(**factories)
        self.generators = {
            "torch": torch.Generator().manual_seed(1),
            "numpy": np.random.default_rng(2),
            "python": random.Random(3),
        }
        self.drawn: list[tuple[float, ...]] = []

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput | Tensor:
        own = self.generators
        numbers = (
            random.random(), float(np.random.rand()), float(torch.rand(1)), random.gauss(0, 1),
            float(torch.rand(1, generator=own["torch"])), float(own["numpy"].random()), own["python"].gauss(0, 1),
        )  # fmt: skip
        self.drawn.append(numbers)
        return super().train_step(model, batch)


def drawn(path: Path, *, without: str | None = None) -> tuple[list[Any], list[Any]]:
    """What a whole run drew, and what a run drew that crashed at step 6 and was resumed from 4."""
    whole, first, second = Draws(), Draws(), Draws()
    fit(path / "whole", whole)
    with pytest.raises(RuntimeError):
        make(path / "cut", first, core(crash=Crash(6))).fit()
    rest = core()
    if without is not None:
        del rest[without]
    fit(path / "cut", second, rest)
    return whole.drawn, [*first.drawn[:4], *second.drawn]


def test_every_stream_of_random_numbers_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, cut = drawn(tmp_path)
    assert whole == cut and len({number for numbers in whole for number in numbers}) == 12 * 7


def test_without_rng_state_only_the_random_numbers_differ(tmp_path: Path) -> None:
    whole, cut = drawn(tmp_path, without="rng_state")
    assert whole[:4] == cut[:4]
    assert all(left != right for left, right in zip(whole[4:], cut[4:], strict=True))
    assert events(tmp_path / "cut", "restored")[0]["position"] == 32


def test_what_is_no_generator_is_refused(tmp_path: Path) -> None:
    recipe = Fit()
    recipe.generators["noise"] = 7
    with pytest.raises(ConfigError, match=r"Recipe\.generators\['noise'\] is a int\. Register a torch\.Generator"):
        make(tmp_path, recipe).fit()


def test_without_data_position_the_epoch_starts_over_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def recipe() -> Fit:
        return Fit(train_data=lambda: Points(40))

    with pytest.raises(RuntimeError):
        make(tmp_path, first := recipe(), core(every=7, crash=Crash(8))).fit()
    rest = core()
    del rest["data_position"]
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, second := recipe(), rest)
    assert second.seen[0] == first.seen[5]  # 7 steps of 8 lie in the epoch that began with the sixth
    assert "callbacks.data_position is removed: epoch 1 starts over, at sample 40" in caplog.text


def passive() -> dict[str, Callback]:
    return {"goodput": GoodputMeterCallback(), "progress": ProgressCallback()}


def test_passive_callbacks_change_no_number(tmp_path: Path) -> None:
    with_them = fit(tmp_path / "with", Fit(), {**core(), **passive()})
    without = fit(tmp_path / "without")
    assert_same(flat(with_them), flat(without))
    assert by_step(tmp_path / "with") == by_step(tmp_path / "without")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals, which must be those of before in the end."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    mine = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == mine
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Send(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number: signal.Signals, step: int) -> None:
        self._number, self._step = number, step

    def grads_ready(self, trainer: Trainer) -> None:
        if trainer.progress.step + 1 == self._step:
            os.kill(os.getpid(), self._number)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, EXIT_SIGTERM), (signal.SIGINT, EXIT_SIGINT), (signal.SIGUSR1, EXIT_REQUEUE)],
)
def test_a_signal_saves_the_step_it_came_in_and_ends_with_its_exit_code(tmp_path: Path, number: Any, code: int) -> None:
    whole = fit(tmp_path / "whole")
    callbacks = core(every=None, preemption=PreemptionCallback(), send=Send(number, 6))
    trainer = make(tmp_path / "cut", Fit(), callbacks)
    assert trainer.fit() == code and trainer.progress.step == 6 and saved_steps(tmp_path / "cut") == [6]
    (received,) = events(tmp_path / "cut", "signal")
    assert received["signal"] == number.name
    (end,) = events(tmp_path / "cut", "end")
    assert (end["status"], end["exit_code"], end["reason"]) == ("killed", code, f"received {number.name}")
    assert_same(flat(whole), flat(fit(tmp_path / "cut")))
    assert by_step(tmp_path / "cut") == by_step(tmp_path / "whole")


@pytest.mark.usefixtures("handlers")
def test_handlers_are_put_back_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(preemption=PreemptionCallback(), crash=Crash(3))).fit()


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path) -> None:
    codes: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    run = threading.Thread(target=lambda: codes.append(make(tmp_path, Fit(), {"p": PreemptionCallback()}).fit()))
    run.start()
    run.join(60)
    assert codes == [0] and signal.getsignal(signal.SIGTERM) is before


def test_lines_are_plain_few_and_end_with_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Fit(eval_data=lambda: Points(8)), core(progress=ProgressCallback()), eval_every=6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 6  eval/loss ") and lines[-1] == "finished at step 12"
    assert any(line.startswith("step 12/12  epoch 1  loss 0.") for line in lines)
    assert len(lines) == 4 and "\x1b" not in "".join(lines)


def test_a_bar_starts_where_the_run_resumed(tmp_path: Path) -> None:
    fit(tmp_path, Fit(), core(progress=ProgressCallback(bar=False)), max_steps=8)
    bar = ProgressCallback(bar=True)
    started: list[tuple[float, float | None]] = []

    class Look(Callback):
        def step_start(self, trainer: Trainer) -> None:
            task = bar._bar.tasks[0]
            started.append((task.completed, task.total))

    fit(tmp_path, Fit(), core(progress=bar, look=Look()))
    assert started[0] == (8, 12) and bar._bar is None


def test_time_is_measured_only_with_the_meter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "off")
    assert all(event["seconds"] == {} for event in events(tmp_path / "off", "steps"))
    fit(tmp_path / "on", Fit(), core(goodput=GoodputMeterCallback()))
    assert all(len(event["seconds"]["productive"]) == len(event["loss"]) for event in events(tmp_path / "on", "steps"))
    assert "goodput" in capsys.readouterr().out


CLASSES = [name for name in package.__all__ if name.endswith("Callback")]


@pytest.mark.parametrize("name", CLASSES)
def test_every_built_in_callback_keeps_to_the_events_and_says_what_it_is(name: str) -> None:
    kind = getattr(package, name)
    assert issubclass(kind, Callback) and kind.__doc__
    own = {key for key, value in vars(kind).items() if callable(value) and not key.startswith("_")}
    allowed = set(vars(Callback)) | {"check", "is_due", "save", "fence", "finish", "restore"}
    assert own <= allowed, own - allowed
    assert kind().state_dict.__qualname__  # each can be made without arguments


def test_names_that_are_not_there_are_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NoSuchCallback'"):
        _ = package.NoSuchCallback
    assert all(getattr(package, name).promise for name in CLASSES if name in PROMISES)
