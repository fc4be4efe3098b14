"""What the tests of files as samples share: trees of small files, and classes that decode paths."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from framework.data import VolumeDataset


def fill(root: Path, count: int, classes: int = 1) -> dict[str, bytes]:
    """Writes small files, `c0/000.bin`, … over some class folders. Returns their contents by relative name."""
    contents = {f"c{number % classes}/{number:03d}.bin": b"file %03d;" % number * 8 for number in range(count)}
    for name, data in contents.items():
        write(root / name, data)
    return contents


def write(path: Path, data: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(dataset: VolumeDataset) -> list[str]:
    """The relative names of all files, in their order."""
    return [dataset.sample_key(index) for index in range(len(dataset))]


def number_in(data: bytes) -> int:
    """The number of the file that holds these bytes."""
    assert data == data[:9] * 8
    return int(data[5:8])


def as_number(data: bytes) -> torch.Tensor:
    """A decoder for what `fill` wrote."""
    return torch.tensor(number_in(data))


def read_number(path: str) -> int:
    """The number of the file at a path."""
    with open(path, "rb") as stream:
        return number_in(stream.read())


class Decoding(IterableDataset[Any]):
    """One sample for each path: the number of the file, and a random number."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        for path in self.files:
            yield read_number(path), random.random()


class Plain(Decoding):
    """The number of the file alone."""

    def __iter__(self) -> Iterator[Any]:
        return map(read_number, self.files)


class Filtering(Decoding):
    """Leaves some files out."""

    def __iter__(self) -> Iterator[Any]:
        return (number for number in map(read_number, self.files) if number % 3)


class Doubling(Decoding):
    """Two samples for each path."""

    def __iter__(self) -> Iterator[Any]:
        for path in self.files:
            yield read_number(path)
            yield read_number(path)


class ReadingAhead(Decoding):
    """Takes a path before the sample of the one before is given."""

    def __iter__(self) -> Iterator[Any]:
        paths = iter(self.files)
        last = next(paths)
        for path in paths:
            yield read_number(last)
            last = path


class Ending(Decoding):
    """Ends after three samples."""

    def __iter__(self) -> Iterator[Any]:
        for _, path in zip(range(3), self.files, strict=False):
            yield read_number(path)


class Failing(Decoding):
    """Cannot decode every fifth file."""

    def __iter__(self) -> Iterator[Any]:
        for path in self.files:
            number = read_number(path)
            if number % 5 == 0:
                raise ValueError(f"{os.path.basename(path)} is damaged")
            yield number
