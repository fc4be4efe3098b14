"""One spelling of lengths, and when something is due."""

from __future__ import annotations

import pytest

from framework.duration import EPOCHS, SECONDS, STEPS, Duration
from framework.errors import ConfigError
from framework.progress import Progress


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (100, 100, STEPS), ("100", 100, STEPS), ("100steps", 100, STEPS), ("1step", 1, STEPS), (" 7 steps ", 7, STEPS),
        ("2epochs", 2, EPOCHS), ("1epoch", 1, EPOCHS), ("0.5epochs", 0.5, EPOCHS), ("1e3", 1000, STEPS),
        ("90s", 90, SECONDS), ("90sec", 90, SECONDS), ("90seconds", 90, SECONDS), ("10min", 600, SECONDS),
        ("1h", 3600, SECONDS), ("1.5h", 5400, SECONDS), ("2d", 172800, SECONDS), ("10MIN", 600, SECONDS),
    ],
)  # fmt: skip
def test_a_length_is_read_as_it_is_written(text: str | int, value: float, unit: str) -> None:
    assert Duration.parse(text, key="a.b") == Duration(value, unit)


def test_a_length_that_was_read_is_written_so_that_it_can_be_read_again() -> None:
    for text in ("100steps", "2epochs", "0.25epochs", "90s"):
        assert str(Duration.parse(text, key="a.b")) == text


@pytest.mark.parametrize(
    "text", ["", "ten", "10 parsecs", "-5", "10min 3s", "1,000", True, "0", 0, "0epochs", "1.5", "nan", "1e999"]
)
def test_what_is_no_length_is_refused_with_key_and_value(text: str | int) -> None:
    with pytest.raises(ConfigError) as caught:
        Duration.parse(text, key="callbacks.mine.every")
    assert f"callbacks.mine.every={text!r}" in str(caught.value)


def test_a_unit_that_has_no_meaning_there_is_refused_with_those_that_have() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.eval_every='10min' is given in seconds.*steps or epochs"):
        Duration.parse("10min", key="trainer.eval_every", allow=(STEPS, EPOCHS))
    with pytest.raises(ConfigError, match=r"in steps, which has no meaning"):
        Duration.parse(Duration(5, STEPS), key="trainer.max_time", allow=(SECONDS,))


def due_at(text: str, samples: int, batch: int, steps: int) -> list[int]:
    """Steps after which a length is due, in a run whose epochs may span batches."""
    duration = Duration.parse(text, key="every")
    found = []
    for step in range(1, steps + 1):
        before, after = (Progress(s, s * batch, s * batch // samples) for s in (step - 1, step))
        if duration.is_due(before, after, samples):
            found.append(step)
    return found


def test_every_k_steps_is_due_at_multiples_of_k() -> None:
    assert due_at("3", samples=10, batch=4, steps=10) == [3, 6, 9]


@pytest.mark.parametrize(
    ("samples", "batch", "text"), [(10, 4, "1epochs"), (7, 3, "2epochs"), (100, 32, "0.5epochs"), (5, 8, "1epochs")]
)
def test_every_k_epochs_is_due_at_the_first_step_that_reaches_a_multiple(samples: int, batch: int, text: str) -> None:
    length = Duration.parse(text, key="every").value * samples
    marks = [k * length for k in range(1, int(60 * batch / length) + 1)]
    first = sorted({next(s for s in range(1, 61) if s * batch >= mark) for mark in marks})
    assert due_at(text, samples, batch, steps=60) == first


def test_a_time_is_never_due_by_progress() -> None:
    assert due_at("1s", samples=10, batch=4, steps=10) == []


def test_epochs_are_rounded_up_to_whole_steps() -> None:
    assert Duration(1, EPOCHS).steps(10, 4) == 3
    assert Duration(2, EPOCHS).steps(10, 4) == 5
    assert Duration(6, STEPS).steps(10, 4) == 6
    with pytest.raises(ValueError, match="is a time"):
        Duration(6, SECONDS).steps(10, 4)
