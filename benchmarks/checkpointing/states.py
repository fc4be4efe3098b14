"""The states that are saved: a model and Adam's moments, as tensors alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MODEL, MOMENTS = "model", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shape:
    """How many parameters, and how long each is; with the moments there are three tensors for each."""

    name: str
    parameters: int
    elements: int

    @property
    def bytes(self) -> int:
        return 3 * 4 * self.parameters * self.elements


LARGE = Shape("large", 50, 1_790_000)  # 1.07 GB in 150 tensors
SMALL = Shape("small", 1_667, 20_000)  # 0.40 GB in 5,001 tensors


def make(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """`{"model": {name: tensor}, "optimizer": {name: {moment: tensor}}}`, float32 `[elements]` each."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape.elements, generator=generator)
    names = [f"layers.{number}.weight" for number in range(shape.parameters)]
    return {
        MODEL: {name: base + number for number, name in enumerate(names)},
        "optimizer": {
            name: {moment: base * (number + 2 + part) for part, moment in enumerate(MOMENTS)}
            for number, name in enumerate(names)
        },
    }


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its joined key."""
    for key, value in state.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from leaves(value, name)
