"""Datasets that keep random generators of their own, in every place where people put them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

shared = np.random.default_rng(0)  # in the module, where nobody passes it on


class Noise:
    """A transform with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        return draw(self.generator)


class Slotted:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random(1)

    def __call__(self) -> float:
        return self.generator.random()


class OfTheClass:
    generator = np.random.default_rng(5)

    def __call__(self) -> float:
        return float(self.generator.random())


class Late:
    """Makes its generator when it first needs it, as people do to have one a worker."""

    def __init__(self) -> None:
        self.generator: np.random.Generator | None = None

    def __call__(self) -> float:
        if self.generator is None:
            self.generator = np.random.default_rng()
        return float(self.generator.random())


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


def from_module() -> float:
    return float(shared.random())


def enclosed() -> Callable[[], float]:
    generator = np.random.Generator(np.random.Philox(3))
    return lambda: float(generator.standard_normal())


PLACES: dict[str, Callable[[], Callable[[], float]]] = {
    "torch": lambda: Noise(torch.Generator()),
    "numpy": lambda: Noise(np.random.default_rng()),
    "numpy old": lambda: Noise(np.random.RandomState()),
    "numpy old over new": lambda: Noise(np.random.RandomState(np.random.PCG64())),
    "numpy sfc": lambda: Noise(np.random.Generator(np.random.SFC64())),
    "numpy twister": lambda: Noise(np.random.Generator(np.random.MT19937())),
    "python": lambda: Noise(random.Random()),
    "list": lambda: functools.partial(lambda each: sum(one() for one in each), [Noise(random.Random()), enclosed()]),
    "mapping": lambda: functools.partial(draw, **{"generator": np.random.default_rng()}),
    "closure": enclosed,
    "bound method": lambda: Noise(random.Random()).__call__,
    "slot": Slotted,
    "class": OfTheClass,
    "module": lambda: from_module,
    "late": Late,
}


class Private(Dataset[Any]):
    """The index, and what a transform draws.

    Args:
        samples: How many.
        place: One of `PLACES`.
    """

    def __init__(self, samples: int, place: str) -> None:
        self.samples = samples
        self.transforms = {"noise": [PLACES[place]()]}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.transforms["noise"][0]()
