"""Compares two runs bit for bit.

    assert compare(unbroken, resumed) == []

Guarantee: equal means that the last checkpoints hold the same bits (every tensor with its name, shape and type, every
value that ranks share, the random number state of every rank) and that the journals tell the same loss and learning
rate of every step and the same evaluation results. Left out are clocks, the config and what names an attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from framework.checkpoint import CheckpointStore, Found
from framework.journal import read_run

# and the config, with what is told from it, whose difference a test may want
CLOCKS = ("shared.elapsed_seconds", "shared.config", "shared.num_workers")
MANIFEST = ("step", "position", "epoch", "skipped", "world_size", "finished")


def compare(run_a: Path, run_b: Path) -> list[str]:
    """Differences between the newest checkpoints and the whole histories of two runs; empty if there are none.

    Args:
        run_a: A run directory.
        run_b: Another.
    """
    return differences(contents(run_a), contents(run_b)) + compare_histories(run_a, run_b)


def compare_histories(run_a: Path, run_b: Path) -> list[str]:
    """Differences between what two journals tell; runs without checkpoints can be compared too."""
    return differences(history(run_a), history(run_b))


def contents(run: Path, step: int | None = None) -> dict[str, Any]:
    """Everything in a checkpoint of a run under dotted keys: `model.…`, `optimizer.…`, `shared.…`, `rank.0.…`, `manifest.…`.

    Args:
        run: The run directory.
        step: Which checkpoint; default the newest.

    Raises:
        AssertionError: There is no such checkpoint.
    """
    found = checkpoint(run, step)
    tensors: dict[str, Any] = {}
    _load_state_dict(
        tensors, storage_reader=FileSystemReader(found.path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    manifest = found.manifest
    values = dict(_leaves(tensors))
    values |= _leaves(torch.load(found.path / manifest.shared_file, weights_only=True), "shared.")
    for rank, name in manifest.rank_files.items():
        values |= _leaves(torch.load(found.path / name, weights_only=True), f"rank.{rank}.")
    values |= {f"manifest.{name}": getattr(manifest, name) for name in MANIFEST}
    return {key: value for key, value in values.items() if not key.startswith(CLOCKS)}


def checkpoint(run: Path, step: int | None = None) -> Found:
    """A published checkpoint of a run, the newest by default."""
    found = [one for one in CheckpointStore(run / "checkpoints").list() if step is None or one.step == step]
    assert found, f"no checkpoint {'' if step is None else step} in {run}"
    return found[0]


def committed_steps(run: Path) -> list[int]:
    """Steps of the published checkpoints of a run, newest first."""
    return [found.step for found in CheckpointStore(run / "checkpoints").list()]


def history(run: Path) -> dict[str, Any]:
    """What the journal of a run tells: `loss.<step>`, `lr.<step>`, `skipped.<step>`, `metrics.<step>.<name>`.

    Of steps that were replayed the later attempt counts. Floats are exact.
    """
    told: dict[str, Any] = {}
    for event in read_run(run / "events"):
        if event["ev"] == "steps":
            for index, (loss, rate) in enumerate(zip(event["loss"], event["lr"], strict=True)):
                step = event["first"] + index
                told[f"loss.{step}"], told[f"lr.{step}"] = loss, rate
                told[f"skipped.{step}"] = step in event["skipped"]
        elif event["ev"] == "metrics":
            told |= {f"metrics.{event['step']}.{name}": value for name, value in event["values"].items()}
    return told


def events(run: Path, name: str, rank: int = 0) -> list[dict[str, Any]]:
    """The events of one kind in the journal of a run, in all attempts."""
    return [event for event in read_run(run / "events", rank) if event["ev"] == name]


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value is not the same to the last bit."""
    found = []
    for key in dict.fromkeys([*a, *b]):
        if key not in a or key not in b:
            found.append(f"{key}: only in the {'first' if key in a else 'second'}")
        elif text := _difference(a[key], b[key]):
            found.append(f"{key}: {text}")
    return found


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        if torch.equal(_bytes(a), _bytes(b)):
            return ""
        unequal = (_bytes(a) != _bytes(b)).sum().item()
        largest = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        return f"{unequal} of {a.numel() * a.element_size()} bytes differ, values by up to {largest:g}"
    if type(a) is type(b) and (a.hex() == b.hex() if isinstance(a, float) else bool(a == b)):
        return ""
    return f"{a!r:.80} and {b!r:.80}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}{key}.")
    elif isinstance(value, list | tuple) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}{index}.")
    else:
        yield prefix.rstrip("."), value
