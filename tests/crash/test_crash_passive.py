"""Passive parts are passive: with or without them, after any number of saves, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same, compare_histories, kept, start

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
