"""Passive parts are passive: with or without them, after any number of saves, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import (
    assert_same,
    committed_steps,
    compare,
    compare_histories,
    contents,
    differences,
    kept,
    settle,
    slow_save,
    start,
)

JOB = ("+recipe=job", "trainer.max_steps=30", "callbacks.async_checkpoint.every=5")
CHANGES = {
    "no progress": ("~callbacks.progress",),
    "no goodput": ("~callbacks.goodput",),
    "no preemption": ("~callbacks.preemption",),
    "a save each step": ("callbacks.async_checkpoint.every=1",),
    "a save at the end": ("callbacks.async_checkpoint.every=null",),
    "a bar": ("callbacks.progress.bar=true",),
}


@pytest.mark.parametrize("change", CHANGES)
def test_bits_are_the_same_with(change: str, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    words = [word for word in JOB if word.split("=")[0] not in {one.split("=")[0] for one in CHANGES[change]}]
    start(*words, *CHANGES[change], "run.name=r", cwd=tmp_path).ends(0)
    expected, run = unbroken(*JOB), tmp_path / "runs" / "r"
    assert_same(expected, run)


def test_bits_are_the_same_with_mlflow(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    mlflow = "callbacks.mlflow={_target_: framework.callbacks.MLflowCallback}"
    start(*JOB, mlflow, "run.name=r", cwd=tmp_path).ends(0, timeout=120)
    assert (tmp_path / "runs" / "r" / "mlflow.json").exists()
    assert_same(unbroken(*JOB), tmp_path / "runs" / "r")


def test_every_step_is_the_same_without_checkpoints(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    words = JOB[:2]
    start(*words, "~callbacks.async_checkpoint", "run.name=r", cwd=tmp_path).ends(0)
    run = tmp_path / "runs" / "r"
    assert not list(run.glob("checkpoints/step_*"))
    assert compare_histories(unbroken(*JOB), run) == []
    assert [line.ids for line in kept(run).values()] == [line.ids for line in kept(unbroken(*JOB)).values()]


def test_training_is_the_same_without_evaluation(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    start(*JOB, "trainer.eval_every=null", "trainer.eval_at_end=false", "run.name=r", cwd=tmp_path).ends(0)
    found = compare(unbroken(*JOB), tmp_path / "runs" / "r")
    assert found and all(line.startswith(("metrics.", "shared.last_metrics")) for line in found)


def test_checkpoint_taken_while_training_goes_on_holds_the_state_of_its_step(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    job = ("+recipe=job", "trainer.max_steps=40", "callbacks.async_checkpoint.keep=null", "trainer.ema_decay=0.9")
    waited = unbroken(*job, settle())
    start(*job, slow_save(write=0.3), "run.name=r", cwd=tmp_path).ends(0)
    run = tmp_path / "runs" / "r"
    steps = committed_steps(run)
    assert len(steps) >= 2 and set(steps) < set(committed_steps(waited))  # some were skipped: training did go on
    for step in steps:
        assert differences(contents(waited, step), contents(run, step)) == []
