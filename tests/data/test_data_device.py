"""Batches that are moved one ahead of the loop."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from data_sets import Numbers

from framework.data import DataLoader
from framework.data.device import DeviceBatches, num_bytes, to_device
from framework.errors import DataError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


class Batches(Iterator[Any]):
    """Numbers its batches, and says how many may be taken without waiting."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.taken = self.there = 0
        self.count = count
        self.broken = broken

    def __next__(self) -> Any:
        if self.taken == self.count:
            raise StopIteration
        self.taken += 1
        if self.taken - 1 == self.broken:
            raise DataError(f"batch {self.broken} is broken")
        return {"x": torch.full((2, 3, 4, 4), self.taken - 1.0), "name": str(self.taken - 1)}

    def is_ready(self) -> bool:
        return self.taken < min(self.there, self.count)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_come_in_order_with_their_nest_on_the_device(device: str) -> None:
    batches = Batches(6)
    batches.there = 4  # the last ones are late
    for number, batch in enumerate(moved := DeviceBatches(batches, device, channels_last=True)):
        assert batch["x"].device.type == device and batch["x"].is_contiguous(memory_format=torch.channels_last)
        assert batch["x"].unique().tolist() == [number] and batch["name"] == str(number)
    assert number == 5
    with pytest.raises(StopIteration):
        next(moved)


def test_one_batch_is_taken_ahead_and_only_if_it_is_there() -> None:
    batches = Batches(6)
    moved = DeviceBatches(batches, "cpu")
    next(moved)
    assert batches.taken == 1 and not moved.is_ready()  # it would have had to wait
    batches.there = 6
    next(moved)
    assert batches.taken == 3 and moved.is_ready()
    next(moved)
    assert batches.taken == 4
    assert DeviceBatches(iter([{"x": torch.ones(1)}]), "cpu").is_ready() is False  # any iterator will do


def test_an_error_ahead_comes_after_the_batches_before_it() -> None:
    batches = Batches(6, broken=2)
    batches.there = 6
    moved = DeviceBatches(batches, "cpu")
    assert [next(moved)["name"] for _ in range(2)] == ["0", "1"]
    with pytest.raises(DataError, match="batch 2 is broken"):
        next(moved)
    assert next(moved)["name"] == "3"


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_ahead_is_not_committed(workers: int) -> None:
    loader = DataLoader(Numbers(40), 4, endless=True, num_workers=workers)
    loader.wants_receipts = True
    moved = DeviceBatches(iter(loader), "cpu")
    for _ in range(3):
        batches = [next(moved).tolist() for _ in range(2)]
        assert [receipt.ids.tolist() for receipt in loader.commit(2)] == batches
    loader.close()


def test_the_size_of_a_batch_is_that_of_its_tensors() -> None:
    assert num_bytes({"x": torch.zeros(3, 4), "y": [torch.zeros(5, dtype=torch.uint8), "name"]}) == 53


class Made(list[Any]):
    """A list that is not made from its items."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "made"


class Read(Mapping[str, Any]):
    """A mapping that nobody can make from items or write to."""

    def __init__(self, first: Any, second: Any) -> None:
        self.parts = {"first": first, "second": second}

    def __getitem__(self, key: str) -> Any:
        return self.parts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def test_containers_of_every_kind_are_moved_and_what_was_given_stays_as_it_was() -> None:
    made = Made()
    made.append(torch.zeros(2))
    lists: defaultdict[str, Any] = defaultdict(list, x=torch.zeros(2))
    read = Read(torch.zeros(2), "text")
    for batch in (made, lists, OrderedDict(x=torch.zeros(2)), ChainMap({"x": torch.zeros(2)})):
        moved = to_device(batch, "meta")
        assert type(moved) is type(batch) and moved is not batch
        (inside,) = moved.values() if isinstance(moved, Mapping) else moved
        (before,) = batch.values() if isinstance(batch, Mapping) else batch
        assert inside.device.type == "meta" and before.device.type == "cpu"
    moved = to_device([made, lists], "meta")
    assert moved[0].name == "made" and moved[1]["another"] == []
    moved = to_device(read, "meta")
    assert moved == {"first": moved["first"], "second": "text"} and moved["first"].device.type == "meta"
    assert read["first"].device.type == "cpu"
