"""Random numbers: RN-01, RN-08."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from case_tools import MLFLOW, PARTS, part
from support import assert_same, compare_histories, differences, endure, events, kill_at, start


def draws(run: Path, rank: int) -> dict[int, dict[str, Any]]:
    """What `case_parts.Draws` logged, by step; the last attempt counts."""
    lines = map(json.loads, (run / f"draws/rank{rank}.jsonl").read_text().splitlines())
    return {line.pop("step"): line for line in lines}


def test_rn_01_each_rank_gets_its_own_streams_back(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    """Only rank 0's RNG is saved and given to all ranks on resume."""
    words = (
        "+recipe=job",
        f"recipe._target_={PARTS}.DrawingJob",
        "trainer.max_steps=14",
        part("Draws"),
        part("Synchronous"),
    )
    endure(*words, "run.name=r", kill_at(7, "forward", rank=1), cwd=tmp_path, ranks=2)
    run, whole = tmp_path / "runs/r", unbroken(*words, ranks=2)
    assert [event["step"] for event in events(run, "restored")] == [5]
    for rank in (0, 1):
        assert draws(run, rank) == draws(whole, rank)
        assert list(draws(run, rank)) and set(draws(run, rank)) == set(range(1, 15))
    for step in range(1, 15):
        first, second = draws(whole, 0)[step], draws(whole, 1)[step]
        assert all(first[name] != second[name] for name in ("torch", "numpy", "python"))
    assert_same(whole, run, ranks=2)


def test_rn_08_passive_parts_change_no_number(tmp_path: Path, with_store: Callable[[Path], Path]) -> None:
    """Turning a passive part (progress, goodput, MLflow, checkpoints) on or off changes the numbers."""
    root = with_store(tmp_path)
    words = ("+recipe=job", "trainer.max_steps=20", part("Weights"))
    removable = (
        "auto_resume",
        "rng_state",
        "data_position",
        "async_checkpoint",
        "goodput",
        "data_meter",
        "progress",
        "preemption",
    )
    variants = {f"without-{name}": f"~callbacks.{name}" for name in (*removable, "non_finite", "ids")}
    variants |= {f"every-{every}": f"callbacks.async_checkpoint.every={every}" for every in (1, 5, "null")}
    variants |= {"mlflow": MLFLOW}
    runs = [start(*words, variant, f"run.name={name}", cwd=tmp_path) for name, variant in variants.items()]
    start(*words, "run.name=all", cwd=tmp_path).ends(0)
    for run in runs:
        run.ends(0, timeout=120)
    expected = torch.load(root / "all/weights/1.end.pt", weights_only=True)
    for name in variants:
        assert differences(expected, torch.load(root / name / "weights/1.end.pt", weights_only=True)) == [], name
        assert compare_histories(root / "all", root / name) == [], name
