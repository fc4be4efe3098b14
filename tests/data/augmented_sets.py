"""Datasets whose samples are augmented at random: what a position must determine bit by bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from cropped_sets import PICTURE
from torch.utils.data import Dataset
from torchvision.transforms import v2

AUGMENT = v2.Compose([v2.RandomResizedCrop(8, antialias=True), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3, 0.3)])


class Augmented(Dataset[Any]):
    """The index, an augmented picture, and one number of each generator."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        picture = AUGMENT((PICTURE.int() + index).to(torch.uint8))
        return {"index": index, "picture": picture, "drawn": (random.random(), np.random.randn(), torch.rand(2))}


class Keyed(Augmented):
    """The same samples in another order: each keeps its key, as files do when some are added."""

    def sample_key(self, index: int) -> str:
        return f"{self.samples - 1 - index}.jpg"
