"""Killed by SIGKILL at any place of a step, of a save or of a restart, a run goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same, committed_steps, endure, events, kill_at, killed, settle, start

JOB = ("+recipe=job", "trainer.max_steps=30", "callbacks.async_checkpoint.every=4", "callbacks.async_checkpoint.keep=2")
IN_A_STEP = ["fetch", "forward", "backward", "before_update", "after_update", "step_end", "evaluation"]
IN_A_SAVE = ["staging", "writing", "sealing", "commit", "committed", "retention"]


@pytest.mark.parametrize("phase", IN_A_STEP)
def test_resume_after_kill_in_a_step_is_bitwise_equal(
    phase: str, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, settle(), "run.name=r", kill_at(14, phase, count=1 if phase == "fetch" else 0))
    endure(*words, cwd=tmp_path)
    (restored,) = events(run, "restored")
    assert restored["step"] == (
        20 if phase == "evaluation" else 12
    )  # an evaluation comes before the save of its step, 24
    assert_same(unbroken(*JOB), run)


@pytest.mark.parametrize("phase", IN_A_SAVE)
def test_resume_after_kill_in_a_save_is_bitwise_equal(
    phase: str, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, settle(), "run.name=r", kill_at(16, phase))  # else an earlier save may still be under way
    killed(start(*words, cwd=tmp_path))
    if phase in ("committed", "retention"):
        assert committed_steps(run)[0] >= 16
    else:
        assert committed_steps(run)[0] < 16  # a half-written checkpoint does not exist
    start(*words, cwd=tmp_path).ends(0)
    assert_same(unbroken(*JOB), run)
    assert not list(run.glob("checkpoints/.trash-*"))


def test_resume_after_kill_in_a_restart_is_bitwise_equal(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    kills = (kill_at(14, "forward"), kill_at(0, "restored", name="again"))
    endure(*JOB, settle(), "run.name=r", *kills, cwd=tmp_path)
    assert len(events(tmp_path / "runs" / "r", "restored")) == 2
    assert_same(unbroken(*JOB), tmp_path / "runs" / "r")


def test_kill_before_the_first_checkpoint_starts_over_and_is_bitwise_equal(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    endure(*JOB, "run.name=r", kill_at(3, "backward"), cwd=tmp_path)
    assert_same(unbroken(*JOB), tmp_path / "runs" / "r")
