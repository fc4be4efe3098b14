"""Signals: SG-01, SG-06, SG-08."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from case_tools import part
from support import assert_same, checkpoint, committed_steps, contents, every_step, kill_at, start


def lost_steps(run: Path, rank: int = 0) -> list[int]:
    """Steps that the second attempt made again."""
    by_attempt = {number: {line.step for line in every_step(run, rank) if line.attempt == number} for number in (1, 2)}
    assert by_attempt[1] and by_attempt[2]
    return sorted(by_attempt[1] & by_attempt[2])


def test_sg_01_sigterm_saves_the_last_completed_step(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    """SIGTERM (preemption) ends the job without a checkpoint, or it is ignored until the kill."""
    words = ("+recipe=job", "trainer.max_steps=30", "recipe.step_seconds=0.05", "callbacks.async_checkpoint.every=1000")
    run = tmp_path / "runs/r"
    job = start(*words, "run.name=r", cwd=tmp_path)
    job.until(lambda: (run / "ids/rank0.jsonl").exists() and len(every_step(run)) >= 16)
    job.kill(number=signal.SIGTERM)
    job.ends(143, timeout=5)
    assert checkpoint(run).step == every_step(run)[-1].step >= 16
    start(*words, "run.name=r", cwd=tmp_path).ends(0)
    assert lost_steps(run) == []
    assert_same(unbroken(*words), run)


@pytest.mark.parametrize("rank", [1, 0])
def test_sg_06_a_signal_to_one_rank_stops_all_at_the_same_step(
    rank: int, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """Only one rank gets the signal; it leaves and the others wait in a collective for ever."""
    words = ("+recipe=job", "trainer.max_steps=60", "recipe.step_seconds=0.02", "callbacks.async_checkpoint.every=1000")
    run = tmp_path / "runs/r"
    first = start(*words, "run.name=r", kill_at(12, "forward", rank=rank, number="SIGTERM"), cwd=tmp_path, ranks=2)
    first.ends(143, timeout=30)
    assert committed_steps(run) == [every_step(run, 0)[-1].step] == [every_step(run, 1)[-1].step]
    assert 12 <= committed_steps(run)[0] < 60
    start(*words, "run.name=r", cwd=tmp_path, ranks=2).ends(0)
    assert lost_steps(run, 0) == lost_steps(run, 1) == []
    assert_same(unbroken(*words, ranks=2), run, ranks=2)


@pytest.mark.cold
def test_sg_06_torchrun_does_not_take_a_stopped_run_for_a_finished_one(tmp_path: Path) -> None:
    """Only one rank gets the signal; under the real launcher both ranks end, and its exit code is not 0."""
    words = ("+recipe=job", "trainer.max_steps=400", "recipe.step_seconds=0.02", part("Saved"))
    run = start(
        *words, "run.name=r", kill_at(12, "forward", rank=1, number="SIGTERM"), cwd=tmp_path, ranks=2, cold=True
    )
    assert run.wait(120) != [0]
    steps = [every_step(tmp_path / "runs/r", rank)[-1].step for rank in (0, 1)]
    assert committed_steps(tmp_path / "runs/r")[0] == steps[0] == steps[1] < 400


@pytest.mark.parametrize("signals", [10, *(pytest.param(10, marks=pytest.mark.soak, id=f"more{n}") for n in range(9))])
def test_sg_08_a_signal_at_any_moment_saves_a_whole_step(
    signals: int, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """Saving inside the signal handler: hangs, or a snapshot in the middle of backward/optimizer step."""
    seed = int(os.environ.get("CRASH_SEED") or random.SystemRandom().randrange(10**9))
    print(f"CRASH_SEED={seed}")
    draw = random.Random(seed)
    words = ("+recipe=job", "trainer.max_steps=700", "recipe.step_seconds=0.005", "trainer.eval_every=null")
    words = (*words, "callbacks.async_checkpoint.every=10")
    run = tmp_path / "runs/r"
    codes = []
    for _ in range(signals):
        job = start(*words, "run.name=r", cwd=tmp_path)
        steps = len(every_step(run)) if (run / "ids/rank0.jsonl").exists() else 0
        if draw.random() < 0.7:  # else it may come before anything has begun
            job.until(lambda steps=steps: (run / "ids/rank0.jsonl").exists() and len(every_step(run)) > steps)
        time.sleep(draw.uniform(0, 0.3))
        number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
        job.kill(number=number)
        codes += job.wait(60)
        assert codes[-1] in (0, {signal.SIGTERM: 143, signal.SIGUSR1: 75}[number], -number), job.output()
        for step in committed_steps(run)[:1]:
            whole_step(run, step)
    assert set(codes) & {75, 143}
    start(*words, "run.name=r", cwd=tmp_path).ends(0)
    assert_same(unbroken(*words), run)


def whole_step(run: Path, step: int) -> None:
    """Fails unless every part of a checkpoint that counts is of that step."""
    found = contents(run, step)
    counts = {key: int(value) for key, value in found.items() if key.endswith(".step") and "optimizer" in key}
    counts |= {key: value for key, value in found.items() if key in ("manifest.step", "shared.progress.step")}
    batches = next(value for key, value in found.items() if key.endswith("num_batches_tracked"))
    assert len(counts) > 3 and set(counts.values()) == {step}, counts
    assert int(batches) == step and found["manifest.position"] == 8 * step
