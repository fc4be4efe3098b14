"""The comparison that the other tests trust does fail: each thing that a resume can get wrong is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import compare, contents, differences, kill_at, killed, settle, start

from framework.checkpoint import CheckpointStore

JOB = ("+recipe=job", "trainer.max_steps=30", settle())


def test_two_runs_of_one_command_are_equal_and_another_seed_is_not(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    start(*JOB, "run.name=same", cwd=tmp_path).ends(0)
    start(*JOB, "run.name=other", "seed=8", cwd=tmp_path).ends(0)
    assert compare(unbroken(*JOB), tmp_path / "runs" / "same") == []
    found = compare(unbroken(*JOB), tmp_path / "runs" / "other")
    for key in (
        "model.head.weight",
        "optimizer.main.state.head.weight.exp_avg",
        "rank.0.callbacks.rng_state",
        "loss.1:",
    ):
        assert any(line.startswith(key) for line in found), key


@pytest.mark.parametrize("stream", ["python", "numpy", "torch", "own", "array"])
def test_one_stream_that_is_not_restored_is_seen(stream: str, tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    words = (*JOB, "run.name=r", kill_at(17, "backward"))
    killed(start(*words, cwd=tmp_path))
    draw = f"+callbacks.draw={{_target_: job_callbacks.Draw, stream: {stream}}}"
    start(*words, draw, cwd=tmp_path).ends(0)
    found = compare(unbroken(*JOB), tmp_path / "runs" / "r")
    assert any(line.startswith("rank.0.callbacks.rng_state") for line in found)
    assert any(line.startswith("model.") for line in found)


def test_removing_rng_state_or_data_position_is_seen(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    for name in ("rng_state", "data_position"):
        words = (*JOB, f"run.name={name}", kill_at(17, "backward"))
        killed(start(*words, cwd=tmp_path))
        start(*words, f"~callbacks.{name}", cwd=tmp_path).ends(0)
        assert any(line.startswith("model.") for line in compare(unbroken(*JOB), tmp_path / "runs" / name))


def test_position_off_by_one_is_seen(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    words = (*JOB, "run.name=r", kill_at(17, "backward"))
    killed(start(*words, cwd=tmp_path))
    start(*words, "+callbacks.shift={_target_: job_callbacks.Shift}", cwd=tmp_path).ends(0)
    found = compare(unbroken(*JOB), tmp_path / "runs" / "r")
    assert any(line.startswith("model.") for line in found)
    assert any(line.startswith("shared.progress.position") for line in found)


def test_one_bit_of_anything_is_seen(unbroken: Callable[..., Path]) -> None:
    values = contents(unbroken(*JOB))
    for key in ("model.head.weight", "optimizer.main.state.head.weight.exp_avg_sq", "model.body.1.num_batches_tracked"):
        changed = dict(values)
        changed[key] = values[key].clone()
        changed[key].reshape(-1).view(torch.uint8)[0] ^= 1
        assert [line.split(":")[0] for line in differences(values, changed)] == [key]
    negative_zero: dict[str, Any] = {"a": torch.zeros(3), "b": 0.0}
    assert len(differences(negative_zero, {"a": -torch.zeros(3), "b": -0.0})) == 2
    assert (
        differences({"a": torch.tensor([torch.nan]), "b": torch.nan}, {"a": torch.tensor([torch.nan]), "b": torch.nan})
        == []
    )
    assert len(differences({"a": 1, "b": 2}, {"b": 2.0})) == 2


def test_a_step_with_another_loss_or_a_missing_step_is_seen(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unbroken(*JOB), copy)
    (journal,) = copy.glob("events/att-*/rank0.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    first = next(line for line in lines if line["ev"] == "steps")
    first["loss"][1] += 1e-7
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line.split(":")[0] for line in compare(unbroken(*JOB), copy)] == [f"loss.{first['first'] + 1}"]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not first))
    assert len(compare(unbroken(*JOB), copy)) == 3 * len(first["loss"])


def test_a_damaged_newest_checkpoint_is_not_equal_to_the_one_before(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unbroken(*JOB), copy)
    store = CheckpointStore(copy / "checkpoints")
    (store.list()[0].path / ".metadata").unlink()
    assert any(line.startswith("manifest.step: 30 and 25") for line in compare(unbroken(*JOB), copy))
