"""Files of a volume as data of the tests' job: by index, or by a class of the user's that decodes paths.

Guarantee: both give the samples of `job.Samples`, by the number that is in each file, with the same noise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from job import CLASSES, FEATURES
from torch.utils.data import IterableDataset

from framework.data import VolumeDataset

_TEACHER = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))


def sample_of(data: bytes) -> dict[str, Any]:
    """The sample of a file, with noise from torch's, numpy's and python's default generators."""
    number = int(data)
    x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(number))
    y = int((x @ _TEACHER).argmax())
    return {
        "x": x + 0.1 * (torch.randn(FEATURES) + float(np.random.standard_normal()) + random.random()),
        "y": y,
        "id": number,
    }


def by_index(root: str, cache: Any = None, manifest: str = "checked", samples: int = 0) -> VolumeDataset:
    """The samples by index; `samples` is what the job says for other datasets."""
    return VolumeDataset(root, decode=sample_of, label=None, cache=cache, manifest=manifest)


class Decoding(IterableDataset[Any]):
    """The samples by a class that opens and decodes paths itself."""

    def __init__(self, root: str, cache: Any = None, manifest: str = "checked", samples: int = 0) -> None:
        self.files = VolumeDataset(root, decode=None, label=None, cache=cache, manifest=manifest)

    def __iter__(self) -> Iterator[Any]:
        for path in self.files:
            with open(path, "rb") as stream:
                yield sample_of(stream.read())


class Dropping(Decoding):
    """Leaves out every seventh sample, as code that filters does."""

    def __iter__(self) -> Iterator[Any]:
        return (sample for sample in super().__iter__() if sample["id"] % 7)
