"""What the tests of `VolumeWriter` and `VolumeReader` share: states, and torch's calls as a user makes them."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from framework.checkpoint import VolumeReader, VolumeWriter

REFUSED = dcp.CheckpointException  # torch wraps every error of a rank in it


def tensors(step: int) -> dict[str, Any]:
    """Tensors of several dtypes and shapes whose values depend on the step; two of them share their memory."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(300, 40, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "half": weight[:7].to(torch.bfloat16),
            "turned": weight.t()[:5],
            "mask": weight[0] > 0,
            "complex": torch.complex(weight[0], weight[1]),
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {"exp_avg": weight * 2, "step": torch.tensor(float(step))},
    }


def state(step: int) -> dict[str, Any]:
    """Tensors, numbers and the states of random number generators."""
    rng = {"python": random.Random(step).getstate(), "numpy": np.random.RandomState(step).get_state()}
    return {**tensors(step), "step": step, "lr": np.float64(0.5) / step, "names": ["a", {"b": None}], "rng": rng}


def save(target: Any, writer: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return dcp.save(target, storage_writer=writer, **options)


def load(target: Any, reader: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(target, storage_reader=reader, **options)
    return target


def write(folder: Path | str, step: int, **options: Any) -> None:
    save(state(step), VolumeWriter(folder, **options))


def read(folder: Path | str, **options: Any) -> dict[str, Any]:
    """What `VolumeReader` reads into a state of step 1."""
    loaded: dict[str, Any] = load(state(1), VolumeReader(folder, **options))
    return loaded


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, and of the same types."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    else:
        assert one == other
