"""Learning rate and accumulation: LR-01, LR-04."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from case_tools import PARTS, part
from support import assert_same, contents, endure, events, global_batches, kept, kill_at

from framework.checkpoint import CheckpointStore

TORCH = "torch.optim.lr_scheduler"
SCHEDULERS = {
    "OneCycleLR": f"{{_target_: {TORCH}.OneCycleLR, max_lr: 0.05}}",
    "CosineAnnealingWarmRestarts": f"{{_target_: {TORCH}.CosineAnnealingWarmRestarts, T_0: 10}}",
    "MultiStepLR": f"{{_target_: {TORCH}.MultiStepLR, milestones: [7, 15], gamma: 0.1}}",
    "LambdaLR": f"{{_target_: {PARTS}.warm_up, steps: 20}}",
    "ReduceLROnPlateau": f"{{_target_: {TORCH}.ReduceLROnPlateau, patience: 0, factor: 0.5, threshold: 0.2}}",
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_01_every_scheduler_goes_on_where_it_was(name: str, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    """After resume the LR is the initial one, lags one step, or the scheduler no longer drives the optimizer."""
    words = ("+recipe=job", "trainer.max_steps=24", "trainer.eval_every=3", "callbacks.async_checkpoint.every=3")
    words = (*words, f"schedule={SCHEDULERS[name]}", "~schedule.warmup", part("Synchronous"))
    kills = (kill_at(7, "forward"), kill_at(16, "forward", name="milestone"))
    endure(*words, "run.name=r", *kills, cwd=tmp_path)
    run, whole = tmp_path / "runs/r", unbroken(*words)
    assert [event["step"] for event in events(run, "restored")] == [6, 15]
    rates = [line.lr for line in kept(run).values()]
    assert rates == [line.lr for line in kept(whole).values()] and len(set(rates)) > 2
    assert_same(whole, run)
    if name == "ReduceLROnPlateau":
        counters = [key for key in contents(whole) if "num_bad_epochs" in key or key.endswith(".best")]
        assert len(counters) >= 2 and all(contents(run)[key] == contents(whole)[key] for key in counters)


def test_lr_04_a_window_is_whole_or_did_not_happen(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    """Resume with accumulation skips the wrong number of micro-batches, or loses a half-filled window."""
    words = ("+recipe=job", "trainer.max_steps=12", "trainer.global_batch_size=16", "trainer.micro_batch_size=4")
    words = (*words, "callbacks.async_checkpoint={every: 1, keep: null}", part("Synchronous"))
    endure(*words, "run.name=r", kill_at(4, "backward", count=1), cwd=tmp_path)
    run = tmp_path / "runs/r"
    assert [event["step"] for event in events(run, "restored")] == [3]
    assert_same(unbroken(*words), run)
    stored = {found.step: found.manifest.position for found in CheckpointStore(run / "checkpoints").list()}
    assert stored == {step: 16 * step for step in range(1, 13)}
    assert all(len(ids) == 16 for ids in global_batches(run).values())
