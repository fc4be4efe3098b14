"""The samples of an epoch as one sequence, and which part of it is whose.

Guarantee: for given counts, seed, epoch and buffer the sequence is the same on every machine, and each sample stands in
it once. What is done of an epoch is a set of intervals of places in it, whoever read them and in however many turns.

Shards are shuffled as wholes and laid end to end. Windows of `buffer` samples cut that into pieces, whatever shards they
lie in, and within each window the samples are shuffled: the place of a sample depends on the seed and the epoch alone,
not on who reads it or where a reader began. This is what a shuffle buffer does, without a memory of what was before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from framework.data.order import Order
from framework.data.seeding import derive

SPEC = "shards/1"  # changes with whatever changes the sequence

Numbers = npt.NDArray[np.int64]
Interval = tuple[int, int]


class Window(NamedTuple):
    """Some samples that lie near each other.

    Args:
        shards: Shard of each, in the order in which they lie.
        indices: Its number within the shard.
        standing: The order in which they stand in the sequence: places in the two above.
    """

    shards: list[int]
    indices: list[int]
    standing: list[int]


class EpochSequence:
    """One epoch.

    Args:
        counts: Samples of each shard, int64 `[shards]`.
        seed: Seed of the run.
        epoch: Number of the epoch.
        shuffle_shards: Whether every epoch has another order of the shards, or all that of their names.
        buffer: Samples of a window; 1: none are shuffled within shards.
    """

    def __init__(self, counts: Numbers, seed: int, epoch: int, *, shuffle_shards: bool, buffer: int) -> None:
        self._buffer = buffer
        self._seed = derive(seed, SPEC, "window", epoch)
        self._shards = np.arange(len(counts), dtype=np.int64)
        if shuffle_shards:
            self._shards = Order(len(counts), derive(seed, SPEC, "order"), epoch).ids(0, len(counts))
        self._ends = np.cumsum(counts[self._shards])
        self._starts = self._ends - counts[self._shards]
        self.samples = int(self._ends[-1])

    def windows(self, part: Sequence[Interval]) -> Iterator[Window]:
        """Places of the sequence, window by window.

        Args:
            part: Which, in order.
        """
        for start, stop in part:
            while start < stop:
                window = start // self._buffer
                end = min(stop, (window + 1) * self._buffer)
                yield self._window(window, start, end)
                start = end

    def following(self, shard: int, part: Sequence[Interval]) -> int | None:
        """The shard to read after one, if there is one for a part of the sequence."""
        end = int(self._ends[np.flatnonzero(self._shards == shard)[0]])
        for start, stop in part:
            first = max(end, start // self._buffer * self._buffer)
            if first < min(self.samples, -(-stop // self._buffer) * self._buffer):
                return int(self._shards[np.searchsorted(self._ends, first, side="right")])
        return None

    def _window(self, number: int, start: int, stop: int) -> Window:
        base = number * self._buffer
        lying = np.arange(start, stop, dtype=np.int64)
        if self._buffer > 1:
            length = min(self._buffer, self.samples - base)
            lying = base + Order(length, self._seed, number).ids(start - base, stop - base)
        order = np.argsort(lying)
        standing = np.empty_like(order)
        standing[order] = np.arange(len(order))
        lying = lying[order]
        places = np.searchsorted(self._ends, lying, side="right")
        return Window(self._shards[places].tolist(), (lying - self._starts[places]).tolist(), standing.tolist())


def left_of(done: Sequence[Interval], samples: int) -> list[Interval]:
    """What is not done.

    Args:
        done: Intervals in order, apart from each other.
        samples: Length of the sequence.
    """
    edges = [0, *(edge for interval in done for edge in interval), samples]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def part_of(left: Sequence[Interval], first: int, count: int) -> list[Interval]:
    """Some places of those that are left.

    Args:
        left: Intervals in order.
        first: How many places are passed over.
        count: How many come then.
    """
    part: list[Interval] = []
    for start, stop in left:
        if first >= stop - start:
            first -= stop - start
            continue
        end = min(stop, start + first + count)
        if end > start + first:
            part.append((start + first, end))
        count -= end - start - first
        first = 0
        if count <= 0:
            break
    return part


def joined(intervals: Sequence[Interval]) -> list[Interval]:
    """The same places by the fewest intervals, in order."""
    found: list[Interval] = []
    for start, stop in sorted(one for one in intervals if one[0] < one[1]):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def is_in_order(intervals: Sequence[Interval], samples: int) -> bool:
    """Whether these are intervals of a sequence, in order and apart from each other."""
    edges = [0, *(edge for interval in intervals for edge in interval), samples]
    return all(before <= after for before, after in pairwise(edges)) and all(start < stop for start, stop in intervals)
