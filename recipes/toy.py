"""A small job for tests, drills and benchmarks: an MLP on generated samples that carry their ids.

Guarantee: a sample is a pure function of its id, so that every run on every machine sees the same data.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from framework import Recipe, StepOutput

FEATURES, CLASSES = 16, 4


def mlp(hidden: int = 32, dropout: float = 0.1) -> nn.Module:
    """Linear, BatchNorm, ReLU, Dropout, Linear: everything that has state or draws random numbers.

    Args:
        hidden: Width of the hidden layer.
        dropout: Share of activations that are dropped.
    """
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, CLASSES)
    )


class Samples(Dataset[dict[str, Any]]):
    """Generated samples: `x` float32 `[16]`, `y` an int below 4 that depends on `x`, and their `id`.

    Args:
        samples: How many.
        offset: Id of the first one, so that two sets need not overlap.
        noise: Standard deviation of noise added to `x` anew in every epoch.
    """

    def __init__(self, samples: int = 960, offset: int = 0, noise: float = 0.1) -> None:
        self._samples = samples
        self._offset = offset
        self._noise = noise
        self._teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index + self._offset
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(number))
        y = int((x @ self._teacher).argmax())
        if self._noise:
            x = x + self._noise * torch.randn(FEATURES)
        return {"x": x, "y": y, "id": number}


class Toy(Recipe):
    """Classifies the samples.

    Args:
        step_seconds: How long each training step sleeps, to stand in for a larger model.
        **factories: Passed on to `Recipe`.
    """

    def __init__(self, *, step_seconds: float = 0.0, **factories: Any) -> None:
        super().__init__(**factories)
        self._step_seconds = step_seconds

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        return StepOutput(nn.functional.cross_entropy(model(batch["x"]), batch["y"]))

    def eval_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(batch["x"])
        return {
            "loss": nn.functional.cross_entropy(logits, batch["y"], reduction="none"),
            "top1": (logits.argmax(1) == batch["y"]).float(),
        }
