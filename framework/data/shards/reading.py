"""Samples of shards one after another, as they lie.

Guarantee: one shard is open at a time, and the next one is announced meanwhile. A sample that cannot be had is an error
in its place, which names shard and byte; where a shard cannot be read on, that holds for what follows in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from framework.data.shards.base import Bytes, Damage, Samples
from framework.data.shards.opening import ShardFiles
from framework.data.shards.sequence import Numbers, Window
from framework.errors import DataError


@dataclass(slots=True)
class Raw:
    """A sample as it is stored.

    Args:
        shard: Where.
        index: Its number in the shard.
        content: What the format gives; an error where it cannot be had.
    """

    shard: int
    index: int
    content: Any


class ShardReader:
    """Reads samples by shard and number. One per iteration.

    Args:
        files: The shards.
        make: Makes the reader of one.
        counts: Samples of each shard.
        following: Gives the shard that comes after one, if there is one.
    """

    def __init__(
        self,
        files: ShardFiles,
        make: Callable[[Bytes], Samples],
        counts: Numbers,
        following: Callable[[int], int | None],
    ) -> None:
        self._files = files
        self._make = make
        self._counts = counts
        self._following = following
        self._shard = -1
        self._samples: Samples | None = None
        self._failure: DataError | None = None

    def read(self, shard: int, index: int) -> Raw:
        """One sample.

        Args:
            shard: Its shard.
            index: Its number there.

        Raises:
            DataError: The shard has more samples than was said.
        """
        if shard != self._shard:
            self._open(shard)
        if self._failure is not None:
            return Raw(shard, index, self._failure)
        assert self._samples is not None
        try:
            content = self._samples.take(index)
            is_whole = index + 1 < self._counts[shard] or self._samples.is_end(index + 1)
        except Damage as damage:
            return Raw(shard, index, self._damaged(shard, index, damage))
        except DataError as error:
            self._failure = error
            return Raw(shard, index, error)
        if not is_whole:
            raise DataError(
                f"{self._files.shown(shard)} has more than the {self._counts[shard]} samples that samples=… says. "
                "Correct that number, or leave it out: then they are counted."
            )
        return Raw(shard, index, content)

    def close(self) -> None:
        """Closes the shard that is open. Idempotent."""
        samples, self._samples, self._shard = self._samples, None, -1
        if samples is not None:
            samples.source.close()

    def _open(self, shard: int) -> None:
        self.close()
        self._shard, self._failure = shard, None
        try:
            self._samples = self._make(self._files.open(shard))
        except DataError as error:
            self._failure = error
        following = self._following(shard)
        if following is not None:
            self._files.prefetch(following)

    def _damaged(self, shard: int, index: int, damage: Damage) -> DataError:
        return DataError(
            f"{self._files.shown(shard)}, sample {index} of {self._counts[shard]}: {damage}. Replace the shard, or "
            "correct samples=… if that was given; loader.on_error=skip goes on without what is damaged."
        )


def buffered(read: Callable[[int, int], Raw], windows: Iterator[Window]) -> Iterator[Raw]:
    """Samples in the order of the sequence.

    While the samples of one window are given out those of the next are read, one for one, so that no more than one
    window is held and reading is spread over time.

    Args:
        read: Reads a sample; it is asked in the order in which they lie.
        windows: From `EpochSequence.windows`.
    """
    window = next(windows, None)
    held: deque[Raw] = deque()
    while window is not None:
        while len(held) < len(window.standing):
            held.append(read(window.shards[len(held)], window.indices[len(held)]))
        present: list[Raw | None] = list(held)
        held.clear()
        standing, window = window.standing, next(windows, None)
        for place in standing:
            raw, present[place] = present[place], None
            assert raw is not None
            yield raw
            if window is not None and len(held) < len(window.standing):
                held.append(read(window.shards[len(held)], window.indices[len(held)]))
