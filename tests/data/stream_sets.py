"""Iterable datasets as people write them. A sample is `(id, noise)`: its number, and what torch's generator gives."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

Sample = tuple[int, Tensor]


def seat(rank: int = 0, ranks: int = 1) -> tuple[int, int]:
    """Which reader this is, and how many there are."""
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return rank * workers + worker, ranks * workers


class Numbers(IterableDataset[Sample]):
    """Every n-th number, from front to back, without a state."""

    def __init__(self, samples: int = 24, rank: int = 0, ranks: int = 1) -> None:
        self.samples, self.rank, self.ranks = samples, rank, ranks

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[Sample]:
        number, readers = seat(self.rank, self.ranks)
        for index in range(number, self.samples, readers):
            yield index, torch.rand(2)


class Whole(Numbers):
    """Does not split itself."""

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self.samples):
            yield index, torch.rand(2)


class Noise(IterableDataset[Tensor]):
    """Nothing but random numbers, without end."""

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.rand(2)


class Shards(IterableDataset[Sample]):
    """Shards of samples with an index and an offset, in the usual style.

    Args:
        shards: Samples of each.
        is_reset: Whether it starts over by itself at its end.
        is_late: Whether it counts a sample only when it is asked for the next.
    """

    def __init__(
        self, shards: tuple[int, ...] = (5, 7, 4, 8), is_reset: bool = False, is_late: bool = False,
        rank: int = 0, ranks: int = 1,
    ) -> None:  # fmt: skip
        starts = [sum(shards[:index]) for index in range(len(shards))]
        self.shards = [list(range(start, start + size)) for start, size in zip(starts, shards, strict=True)]
        self.is_reset, self.is_late, self.rank, self.ranks = is_reset, is_late, rank, ranks
        self.shard = self.offset = 0

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[Sample]:
        number, readers = seat(self.rank, self.ranks)
        mine = self.shards[number::readers]
        while self.shard < len(mine):
            while self.offset < len(mine[self.shard]):
                sample = mine[self.shard][self.offset], torch.rand(2)
                if self.is_late:
                    yield sample
                    self.offset += 1
                else:
                    self.offset += 1
                    yield sample
            self.shard += 1
            self.offset = 0
        if self.is_reset:
            self.shard = self.offset = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard, self.offset = state["shard"], state["offset"]


class Endless(Shards):
    """Goes on for ever, epoch after epoch, each in an order of its own."""

    def __init__(self, samples: int = 24) -> None:
        super().__init__((samples,))
        self.epoch = 0

    def __iter__(self) -> Iterator[Sample]:
        number, readers = seat()
        while True:
            mine = self.shards[0][number::readers]
            random.Random(self.epoch).shuffle(mine)
            while self.offset < len(mine):
                self.offset += 1
                yield mine[self.offset - 1], torch.rand(2)
            self.epoch, self.offset = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.offset = state["epoch"], state["offset"]


class Coarse(Shards):
    """Its state knows the shard, not the offset."""

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "offset": 0}


class Uncopied(Shards):
    """Holds something that cannot be copied."""

    def __init__(self, shards: tuple[int, ...] = (5, 7, 4, 8)) -> None:
        super().__init__(shards)
        self.lock = threading.Lock()


class Counting(Numbers):
    """Counts its epochs itself, and is in another order in each."""

    def __init__(self, samples: int = 24) -> None:
        super().__init__(samples)
        self.epoch = 0

    def __iter__(self) -> Iterator[Sample]:
        number, readers = seat()
        order = list(range(self.samples))
        random.Random(self.epoch).shuffle(order)
        for index in order[number::readers]:
            yield index, torch.rand(2)
        self.epoch += 1


class Deadly(Numbers):
    """Kills its worker once, at one sample.

    Args:
        at: Which sample.
        trap: A file that says that it is still to be done.
    """

    def __init__(self, samples: int, at: int, trap: Path) -> None:
        super().__init__(samples)
        self.at, self.trap = at, trap

    def __iter__(self) -> Iterator[Sample]:
        for sample in super().__iter__():
            if sample[0] == self.at and self.trap.exists():
                self.trap.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


class Cut:
    """A stream that can be cut anew at any sample: the numbers in order, in one virtual sequence."""

    def __init__(self, samples: int = 24) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def begin(self, epoch: int, *, seed: int, done: Any, shares: Any, consumer: int, taken: int) -> Iterator[Any]:
        left = [one for one in range(self.samples) if done is None or one not in done["ids"]]
        start = sum(shares[:consumer])
        assert sum(shares) == len(left)
        for number in left[start + taken : start + shares[consumer]]:
            yield number, (number, torch.tensor([number, epoch]))

    def merge(self, epoch: int, *, seed: int, done: Any, shares: Any, taken: Any) -> Any:
        left = [one for one in range(self.samples) if done is None or one not in done["ids"]]
        ids = [] if done is None else list(done["ids"])
        for consumer, count in enumerate(taken):
            start = sum(shares[:consumer])
            ids += left[start : start + count]
        return {"ids": ids}
