"""Samples augmented by cheap operations, for tests that load very many: nothing here takes long to import."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

PICTURE = torch.randint(0, 256, (3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Cropped(Dataset[Any]):
    """The index, an augmented picture, and one number of each generator."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        top, left = random.randrange(12), int(np.random.randint(12))
        picture = PICTURE[:, top : top + 8, left : left + 8] + torch.randint(0, 9, (8, 8), dtype=torch.uint8)
        return {"index": index, "picture": picture, "drawn": (random.random(), np.random.randn(), torch.rand(2))}
