"""A signal asks a run to save and leave: the last completed step is committed, and the same command goes on from it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same, committed_steps, contents, events, kill_at, settle, slow_save, start

JOB = ("+recipe=job", "trainer.max_steps=30", "callbacks.async_checkpoint.every=7")
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 75}


@pytest.mark.parametrize("name", CODES)
def test_signal_commits_the_step_and_the_rerun_is_bitwise_equal(
    name: str, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, "run.name=r", kill_at(17, "backward", number=name))
    start(*words, cwd=tmp_path).ends(CODES[name])
    assert committed_steps(run)[0] == 17
    (end,) = events(run, "end")
    assert (end["status"], end["exit_code"], end["step"]) == ("killed", CODES[name], 17)
    start(*words, cwd=tmp_path).ends(0)
    assert_same(unbroken(*JOB), run)


def test_signal_during_a_save_commits_that_save_and_the_step(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    run = tmp_path / "runs" / "r"
    # far more steps than are made until the thread that writes has sent the signal
    job = ("+recipe=job", "trainer.max_steps=300", "callbacks.async_checkpoint.every=14")
    words = (*job, "run.name=r", slow_save(commit=0.3), kill_at(14, "sealing", number="SIGTERM"))
    start(*words, cwd=tmp_path).ends(143)
    last, before = committed_steps(run)[:2]
    assert before >= 14 and before < last < 300
    start(*words, cwd=tmp_path).ends(0)
    assert_same(unbroken(*job), run)


def test_signal_during_evaluation_breaks_it_off_and_the_rerun_makes_up_for_it(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, "run.name=r", kill_at(12, "evaluation", number="SIGTERM", count=2))
    start(*words, cwd=tmp_path).ends(143)
    assert committed_steps(run)[0] == 12 and events(run, "metrics") == []
    assert contents(run)["shared.pending_evaluation"] is True
    start(*words, cwd=tmp_path).ends(0)
    assert [event["step"] for event in events(run, "metrics")] == [12, 24, 30]
    assert_same(unbroken(*JOB), run)


def test_second_signal_ends_the_process_at_once_and_the_rerun_is_bitwise_equal(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, "run.name=r", kill_at(17, "backward", number="SIGTERM"))
    first = start(*words, settle(), slow_save(commit=30.0), "callbacks.async_checkpoint.every=null", cwd=tmp_path)
    first.until(lambda: any(event["step"] == 17 for event in events(run, "save_start")))
    first.kill(number=signal.SIGTERM)
    first.ends(-signal.SIGTERM)
    assert committed_steps(run) == []
    start(*words, cwd=tmp_path).ends(0)
    assert_same(unbroken(*JOB), run)


def test_signal_from_outside_before_the_first_step_leaves_a_run_that_goes_on(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, "run.name=r", "recipe.step_seconds=0.02")
    first = start(*words, cwd=tmp_path).until(lambda: bool(events(run, "attempt_start")))
    first.kill(number=signal.SIGTERM)
    assert first.wait()[0] in (143, -signal.SIGTERM)  # the latter while nothing is set up that could be saved
    start(*words, cwd=tmp_path).ends(0)
    assert_same(unbroken(*JOB), run)


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_one_rank_makes_both_save_the_same_step(
    rank: int, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    job = ("+recipe=job", "trainer.max_steps=200", "callbacks.async_checkpoint.every=null", "trainer.eval_every=null")
    words = (*job, "run.name=r", "recipe.step_seconds=0.005", kill_at(17, "backward", rank=rank, number="SIGTERM"))
    start(*words, cwd=tmp_path, ranks=2).ends(143)
    (step,) = committed_steps(run)
    assert 17 <= step < 200
    assert [events(run, "end", rank=r)[0]["step"] for r in (0, 1)] == [step, step]
    start(*words, cwd=tmp_path, ranks=2).ends(0)
    assert_same(unbroken(*job, ranks=2), run, ranks=2)


def test_signals_to_all_ranks_at_different_steps_make_both_save_the_same_step(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    job = ("+recipe=job", "trainer.max_steps=200", "callbacks.async_checkpoint.every=null", "trainer.eval_every=null")
    signals = (
        kill_at(17, "backward", rank=0, number="SIGTERM", name="one"),
        kill_at(18, "forward", rank=1, number="SIGTERM", name="two"),
    )
    words = (*job, "run.name=r", "recipe.step_seconds=0.005", *signals)
    start(*words, cwd=tmp_path, ranks=2).ends(143)
    assert len(committed_steps(run)) == 1
    start(*words, cwd=tmp_path, ranks=2).ends(0)
    assert_same(unbroken(*job, ranks=2), run, ranks=2)
