"""The job that tests train: small and quick, with everything in it that a resume can get wrong.

Guarantee: BatchNorm, dropout, noise on the samples, and a draw from every generator of the process and from two of the
recipe's own in every step: if any of them is not restored, the weights differ from that step on. Evaluation draws too.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from framework import Recipe, StepOutput

FEATURES, CLASSES = 16, 4


def mlp(hidden: int = 32, dropout: float = 0.1) -> nn.Module:
    """`body`: Linear, BatchNorm, ReLU, Dropout; `head`: Linear."""
    body = nn.Sequential(nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(hidden, CLASSES)))


class Samples(Dataset[dict[str, Any]]):
    """Generated samples `{"x": float32 [16], "y": int, "id": int}`.

    Args:
        samples: How many.
        offset: Id of the first one.
        noise: Standard deviation of noise on `x`, drawn from torch's, numpy's and python's default generators.
    """

    def __init__(self, samples: int = 96, offset: int = 0, noise: float = 0.1) -> None:
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
            x = x + self._noise * (torch.randn(FEATURES) + float(np.random.standard_normal()) + random.random())
        return {"x": x, "y": y, "id": number}


class Job(Recipe):
    """Classifies the samples.

    Args:
        step_seconds: How long each training step sleeps.
        eval_seconds: How long each evaluation step sleeps.
        **factories: Passed on to `Recipe`.

    Attributes:
        seen: Ids of the samples that `train_step` got since somebody emptied the list.
    """

    def __init__(self, *, step_seconds: float = 0.0, eval_seconds: float = 0.0, **factories: Any) -> None:
        super().__init__(**factories)
        self._step_seconds = step_seconds
        self._eval_seconds = eval_seconds
        self.seen: list[int] = []
        self.generators = {"own": torch.Generator().manual_seed(5), "array": np.random.default_rng(5)}

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self.seen.extend(batch["id"].tolist())
        logits = model(batch["x"])
        jitter = torch.randn(logits.shape, generator=self.generators["own"])
        smoothing = 0.02 * (random.random() + float(np.random.random()) + float(self.generators["array"].random()))
        loss = nn.functional.cross_entropy(logits + 0.1 * jitter, batch["y"], label_smoothing=smoothing)
        return StepOutput(loss)

    def eval_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._eval_seconds:
            time.sleep(self._eval_seconds)
        logits = model(batch["x"])
        random.random(), np.random.random(), torch.rand(1)  # training must not miss them
        return {
            "loss": nn.functional.cross_entropy(logits, batch["y"], reduction="none"),
            "top1": (logits.argmax(1) == batch["y"]).float(),
        }
