"""How callbacks are called: in which order, how often, and what their errors do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import callback as callback_module
from framework.callback import EVENTS, Callback, Events
from framework.errors import ConfigError
from framework.progress import Progress
from framework.trainer import Trainer
from tests.loop.runs import Crash, Fit, Points, core, events, fit, make

ENDS = {"step_end", "epoch_end", "eval_end", "exception", "train_end", "close"}


def recorder(log: list[tuple[str, str]]) -> type[Callback]:
    """A class of callbacks that override every event and note that they were called."""

    def note(event: str) -> Callable[..., None]:
        return lambda self, *arguments: log.append((event, self.name))

    return type("Recorder", (Callback,), {event: note(event) for event in EVENTS})


def test_the_order_of_events_is_that_of_the_loop(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    kind = recorder(log)
    recipe = Fit(train_data=lambda: Points(12), eval_data=lambda: Points(4))
    fit(tmp_path, recipe, core(every=2, only=kind()), max_steps=3, eval_every=2, eval_at_end=False)
    step = ["step_start", "grads_ready", "step_end"]
    expected = [
        "setup", "train_start", "epoch_start",
        *step,
        *step, "epoch_end", "epoch_start", "eval_start", "eval_end", "save_start",
        "step_start", "grads_ready", "step_end", "epoch_end", "save_start", "train_end", "close",
    ]  # fmt: skip
    assert [event for event, _ in log if event != "save_committed"] == expected
    assert [event for event, _ in log].count("save_committed") == 2
    log.clear()
    fit(tmp_path, recipe, core(every=2, only=kind()), max_steps=4, eval_every=None, eval_at_end=False)
    assert [event for event, _ in log][:4] == ["setup", "state_loaded", "train_start", "epoch_start"]


def test_ends_are_called_in_reverse(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    kind = recorder(log)
    crash = {"crash": Crash(5), "a": kind(), "b": kind(), "c": kind()}
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(eval_data=lambda: Points(4)), core(**crash), eval_every=2).fit()
    fit(tmp_path, Fit(eval_data=lambda: Points(4)), core(a=kind(), b=kind(), c=kind()), eval_every=2)
    assert {event for event, _ in log} == set(EVENTS)
    for event in EVENTS:
        names = [name for other, name in log if other == event][:3]
        assert names == (["c", "b", "a"] if event in ENDS else ["a", "b", "c"]), event


class Two(Callback):
    def step_end(self, trainer: Trainer, output: object) -> None: ...

    def close(self, trainer: Trainer) -> None: ...


def test_only_overridden_events_are_called() -> None:
    bound = Events({"two": Two(), "none": Callback()}, 8)
    assert bound.plan() == ["step_end: two", "close: two"]
    assert bound.listens("step_end") and not bound.listens("setup")
    assert [event for event in EVENTS if bound.listens(event)] == ["step_end", "close"]


def called_at(tmp_path: Path, every: str | int | None) -> list[int]:
    seen: list[int] = []

    class Often(Callback):
        def step_end(self, trainer: Trainer, output: object) -> None:
            seen.append(trainer.progress.step)

    often = Often()
    often.every = every
    fit(tmp_path, Fit(train_data=lambda: Points(20)), {"often": often})
    return seen


@pytest.mark.parametrize(
    ("every", "steps"),
    [(None, list(range(1, 13))), (1, list(range(1, 13))), ("5", [5, 10]), ("1epochs", [3, 5, 8, 10]), ("1h", [])],
)
def test_every_says_how_often(tmp_path: Path, every: Any, steps: list[int]) -> None:
    assert called_at(tmp_path, every) == steps


def test_a_time_is_due_when_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    often = Two()
    often.every = "10s"
    _, _, due = Events({"often": often}, 8)._step_end[0]
    assert due is not None
    found = []
    for second in range(100, 135):
        now[0] = float(second)
        if due(Progress(), Progress()):
            found.append(second)
    assert found == [110, 120, 130]


def test_a_length_that_is_none_is_refused_with_the_name(tmp_path: Path) -> None:
    often = Two()
    often.every = "sometimes"
    with pytest.raises(ConfigError, match=r"callbacks\.often\.every='sometimes' is not a duration"):
        make(tmp_path / "run", Fit(), {"often": often}).fit()
    assert not (tmp_path / "run").exists()


class Bad(Callback):
    """Fails in `step_end`, and notes that it was closed."""

    def __init__(self, critical: bool, closes: list[str], fails_in_close: bool = False) -> None:
        self.critical = critical
        self.calls = 0
        self._closes = closes
        self._fails_in_close = fails_in_close

    def step_end(self, trainer: Trainer, output: object) -> None:
        self.calls += 1
        raise ValueError(f"call {self.calls}")

    def close(self, trainer: Trainer) -> None:
        self._closes.append(self.name)
        if self._fails_in_close:
            raise OSError(f"{self.name} cannot close")


def test_an_error_of_a_critical_callback_stops_the_run_and_names_it(tmp_path: Path) -> None:
    closes: list[str] = []
    with pytest.raises(ValueError, match="call 1") as caught:
        make(tmp_path, Fit(), core(culprit=Bad(True, closes))).fit()
    assert caught.value.__notes__ == ["raised by step_end() of the callback 'culprit'"]
    assert closes == ["culprit"]


def test_an_observer_is_switched_off_after_three_errors_and_still_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closes: list[str] = []
    bad = Bad(False, closes)
    with caplog.at_level(logging.WARNING):
        trainer = fit(tmp_path, Fit(), core(bad=bad))
    assert trainer.progress.step == 12 and bad.calls == 3 and closes == ["bad"]
    assert caplog.text.count("callback 'bad' failed in step_end()") == 3
    assert caplog.text.count("callback 'bad' is switched off after 3 errors; training goes on") == 1


def test_all_are_closed_whatever_others_do_and_the_errors_are_collected(tmp_path: Path) -> None:
    closes: list[str] = []

    class Closes(Bad):
        def step_end(self, trainer: Trainer, output: object) -> None: ...

    callbacks = core(a=Closes(True, closes), b=Closes(True, closes, True), c=Closes(True, closes, True))
    with pytest.raises(ExceptionGroup) as caught:
        make(tmp_path, Fit(), callbacks).fit()
    assert closes == ["c", "b", "a"]
    assert [str(error) for error in caught.value.exceptions] == ["c cannot close", "b cannot close"]
    assert caught.value.exceptions[1].__notes__ == ["raised by close() of the callback 'b'"]


def test_an_error_while_closing_never_hides_the_one_that_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closes: list[str] = []
    with pytest.raises(ValueError, match="call 1"), caplog.at_level(logging.ERROR):
        make(tmp_path, Fit(), core(a=Bad(True, closes, fails_in_close=True))).fit()
    assert closes == ["a"] and "while closing: OSError: a cannot close" in caplog.text


def test_the_error_is_told_to_all_before_they_are_closed(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    kind = recorder(log)
    got: list[BaseException] = []

    class Take(Callback):
        def exception(self, trainer: Trainer, error: BaseException) -> None:
            got.append(error)
            raise KeyError("another")

    with pytest.raises(RuntimeError) as caught:
        make(tmp_path, Fit(), core(crash=Crash(3), a=kind(), take=Take(), b=kind())).fit()
    assert got == [caught.value]
    assert any("another error came up: KeyError" in note for note in caught.value.__notes__)
    tail = [entry for entry in log if entry[0] in ("exception", "train_end", "close")]
    assert [event for event, _ in tail] == ["exception", "train_end", "train_end", "close", "close"]
    assert events(tmp_path, "end")[0]["status"] == "failed"


def test_a_run_that_fails_while_it_is_set_up_is_closed_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What ended the run is the only thing that is told, also by callbacks that were not set up yet."""
    from framework.callbacks import GoodputMeterCallback, PreemptionCallback, ProgressCallback

    class Fails(Callback):
        def setup(self, trainer: Trainer) -> None:
            raise PermissionError("no room")

    builtin = {"goodput": GoodputMeterCallback(), "progress": ProgressCallback(), "preemption": PreemptionCallback()}
    for callbacks in ({"fails": Fails(), **core(), **builtin}, core(**builtin, fails=Fails())):
        caplog.clear()
        with pytest.raises(PermissionError, match="no room"), caplog.at_level(logging.WARNING):
            make(tmp_path / str(len(list(tmp_path.iterdir()))), Fit(), callbacks).fit()
        assert caplog.messages == []


def test_the_docstring_names_every_event_in_order() -> None:
    text = callback_module.__doc__ or ""
    places = [text.index(f" {event}") for event in EVENTS if event not in ("eval_end",)]
    assert places == sorted(places) and "eval_start · eval_end" in text
