"""The record of what is done, and the errors of the ground floor."""

from __future__ import annotations

import inspect

import pytest

from framework import errors
from framework.progress import Progress


def test_progress_is_never_changed_in_place() -> None:
    before = Progress(3, 24, 1, 2)
    after = before.advance(32, 2)
    assert (before, after) == (Progress(3, 24, 1, 2), Progress(4, 32, 2, 2))
    assert after.with_skipped(3) == Progress(4, 32, 2, 5)
    with pytest.raises(AttributeError):
        before.step = 4  # type: ignore[misc]


def test_progress_comes_back_from_its_state() -> None:
    progress = Progress(3, 24, 1, 2)
    assert Progress.from_state_dict(progress.state_dict()) == progress


def test_every_error_of_the_framework_can_be_caught_as_one_kind() -> None:
    kinds = [one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__]
    assert len(kinds) > 8
    assert all(issubclass(one, errors.FrameworkError) for one in kinds)


def test_a_misspelt_name_is_answered_with_the_nearest_one() -> None:
    assert errors.suggest("max_step", ["max_steps", "seed"]) == " Did you mean 'max_steps'?"
    assert errors.suggest("zzz", ["max_steps", "seed"]) == ""
