"""As a user starts it: a new interpreter, the real torchrun. The bits are those of the warm processes of the other tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same, events, kill_at, killed, settle, start

JOB = ("+recipe=job", "trainer.max_steps=30")

pytestmark = [pytest.mark.cold, pytest.mark.timeout(600)]


def test_killed_interpreter_and_a_new_one_are_bitwise_equal_to_the_unbroken_run(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    words = (*JOB, settle(), "run.name=r", kill_at(14, "backward"))
    start(*words, cwd=tmp_path, cold=True, env={"PYTHONHASHSEED": "1"}).crashed(timeout=150)
    start(*words, cwd=tmp_path, cold=True, env={"PYTHONHASHSEED": "2"}).ends(0, timeout=150)
    assert_same(unbroken(*JOB), tmp_path / "runs" / "r")


def test_torchrun_with_two_ranks_killed_and_started_again_is_bitwise_equal(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, settle(), "run.name=r", "trainer.timeout=20s", kill_at(14, "backward", rank=1))
    first = start(*words, cwd=tmp_path, ranks=2, cold=True).ends(1, timeout=200)  # torchrun's own code for a dead rank
    assert "-9" in first.output()
    start(*words, cwd=tmp_path, ranks=2, cold=True).ends(0, timeout=200)
    assert events(run, "restored")[0]["step"] == 10
    assert_same(unbroken(*JOB, ranks=2), run, ranks=2)


def test_torchrun_with_four_ranks_goes_on_bitwise_equal(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, settle(), "run.name=r", kill_at(14, "backward", rank=2))
    killed(start(*words, cwd=tmp_path, ranks=4))
    start(*words, cwd=tmp_path, ranks=4, cold=True).ends(0, timeout=300)
    assert events(run, "restored")[0]["step"] == 10
    assert_same(unbroken(*JOB, ranks=4), run, ranks=4)
