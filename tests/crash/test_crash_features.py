"""Whatever a job uses, two kills leave no trace in its bits: one in the middle of a backward, one in a torn file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same, contents, endure, events, every_step, kill_at, killed, settle, start

JOB, TWO = "+recipe=job", "+recipe=job_two"
STEPS = "trainer.max_steps=26"
SCALER = "+callbacks.pace={_target_: job_callbacks.ScalerPace, growth_interval: 3}"
ONE_CYCLE = ("schedule={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.02}", "~schedule.warmup")
FEATURES = {
    "workers": (JOB, "loader.num_workers=2"),
    "accumulation": (JOB, "trainer.micro_batch_size=2"),
    "fp16": (JOB, "trainer.precision=fp16", SCALER),
    "bf16": (JOB, "trainer.precision=bf16"),
    "ema": (JOB, "trainer.ema_decay=0.9"),
    "clip": (JOB, "trainer.clip_norm=0.5"),
    "two optimizers": (TWO,),
    "two optimizers and fp16": (TWO, "trainer.precision=fp16", SCALER, "trainer.clip_norm=0.5"),
    "a save each step": (JOB, "callbacks.async_checkpoint.every=1", settle()),
    "scheduler of torch": (JOB, *ONE_CYCLE),
    "carry": (JOB, "data.train.samples=91"),
    "drop": (JOB, "data.train.samples=91", "loader.epoch_end=drop"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_resume_after_kills_is_bitwise_equal_with(feature: str, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    words = (*FEATURES[feature], STEPS)
    phase = "after_update" if feature.startswith("two") else "backward"  # between the updates of two optimizers
    kills = (kill_at(10, phase, count=int(feature == "accumulation")), kill_at(21, "writing", name="late"))
    endure(*words, *(() if settle() in words else (settle(),)), "run.name=r", *kills, cwd=tmp_path)
    assert len(events(tmp_path / "runs" / "r", "restored")) == 2
    assert_same(unbroken(*words), tmp_path / "runs" / "r")


def test_fp16_run_changes_its_scale(unbroken: Callable[..., Path]) -> None:
    run = unbroken(*FEATURES["fp16"], STEPS)
    assert contents(run)["shared.scaler.scale"] > 1024.0  # or the test above compares nothing


def test_number_of_loader_processes_may_change_between_attempts(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    run = tmp_path / "runs" / "r"
    words = (JOB, STEPS, "run.name=r", settle(), kill_at(13, "fetch"))
    killed(start(*words, "loader.num_workers=2", cwd=tmp_path))
    start(*words, "loader.num_workers=0", cwd=tmp_path).ends(0)
    assert {line.attempt for line in every_step(run)} == {1, 2}
    assert_same(unbroken(JOB, STEPS), run)
