"""The job's samples as streams, in the ways in which people write them.

Guarantee: sample `i` of a stream is sample `i` of `job.Samples`, noise included, so that every class can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from job import Samples
from torch.utils.data import IterableDataset, get_worker_info

Sample = dict[str, Any]


def seat() -> tuple[int, int]:
    """Which reader this is, and how many there are."""
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank * workers + worker, ranks * workers


class Plain(IterableDataset[Sample]):
    """Splits itself; has no state.

    Args:
        samples: How many.
        length: What `__len__` says; none: there is no length.
        log: A file that gets the number of each sample that is made.
        seconds: How long one takes.
    """

    def __init__(self, samples: int = 96, length: int | None = 96, log: str = "", seconds: float = 0.0) -> None:
        self.data = Samples(samples)
        self.length = length
        self.log = log
        self.seconds = seconds

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length

    def __iter__(self) -> Iterator[Sample]:
        number, readers = seat()
        for index in range(number, len(self.data), readers):
            yield self.make(index)

    def make(self, index: int) -> Sample:
        if self.log:
            with Path(self.log).open("a") as log:
                log.write(f"{index}\n")
        if self.seconds:
            time.sleep(self.seconds)
        return self.data[index]


class Whole(Plain):
    """Does not split itself: every reader gets everything."""

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self.data)):
            yield self.make(index)


class Alike(Plain):
    """All samples are one and the same, so that nobody can see whether it splits itself."""

    def __iter__(self) -> Iterator[Sample]:
        sample = Samples(1, noise=0.0)[0]
        for _ in range(96):
            yield sample


class Shards(Plain):
    """Shards with an index and an offset in the usual style: alive over epochs, used up at the end of each."""

    def __init__(self, samples: int = 96, shard: int = 8, log: str = "", seconds: float = 0.0) -> None:
        super().__init__(samples, samples, log, seconds)
        self.shards = [range(start, min(start + shard, samples)) for start in range(0, samples, shard)]
        self.shard = self.offset = 0

    def __iter__(self) -> Iterator[Sample]:
        number, readers = seat()
        mine = self.shards[number::readers]
        while self.shard < len(mine):
            while self.offset < len(mine[self.shard]):
                self.offset += 1
                yield self.make(mine[self.shard][self.offset - 1])
            self.shard, self.offset = self.shard + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard, self.offset = state["shard"], state["offset"]
