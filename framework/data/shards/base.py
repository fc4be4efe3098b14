"""A shard and its samples, whatever the format.

Guarantee: samples are read by their number within the shard, and what is read is the same wherever reading begins.
Damage is an error that says at which byte and what; nothing is passed over because it could not be understood.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Damage(Exception):
    """A shard is not what it should be.

    Args:
        offset: The byte at which that shows.
        what: What is wrong.
    """

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(f"damaged at byte {offset:,}: {what}")


class Bytes:
    """The bytes of a shard, read a chunk at a time.

    Args:
        size: How many there are.
        fetch: Gives `length` bytes from `offset` on; it never gives fewer.
        chunk: Bytes of one request at least.
        close: Called when no more is read.
    """

    def __init__(
        self, size: int, fetch: Callable[[int, int], bytes], chunk: int, close: Callable[[], None] = lambda: None
    ) -> None:
        self.size = size
        self.close = close
        self._fetch = fetch
        self._chunk = chunk
        self._start = 0
        self._held = b""

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from a place on, fewer where the shard ends."""
        length = max(0, min(length, self.size - offset))
        place = offset - self._start
        if place >= 0 and place + length <= len(self._held):
            return self._held[place : place + length]
        if length >= self._chunk:
            return self._fetch(offset, length)
        self._held = self._fetch(offset, min(self._chunk, self.size - offset))
        self._start = offset
        return self._held[:length]

    def chunk(self, offset: int) -> bytes:
        """As many bytes from a place on as are at hand, at least one; none at the end."""
        if offset >= self.size:
            return b""
        place = self._at(offset)
        return self._held[place:]

    def until(self, offset: int, mark: bytes) -> tuple[bytes, bool]:
        """What `chunk` gives, but only up to a mark; and whether the mark is there."""
        place = self._at(offset)
        found = self._held.find(mark, place)
        return (self._held[place:found], True) if found >= 0 else (self._held[place:], False)

    def _at(self, offset: int) -> int:
        """The place in what is held of a byte before the end, which is read if it has to be."""
        if not 0 <= offset - self._start < len(self._held):
            self.read(offset, min(self._chunk - 1, self.size - offset))
        return offset - self._start


class Samples(ABC):
    """The samples of one open shard, in an order that they are asked for mostly from front to back.

    Args:
        source: The shard.
    """

    def __init__(self, source: Bytes) -> None:
        self.source = source

    @abstractmethod
    def count(self) -> int:
        """How many there are; reads no more than it must.

        Raises:
            Damage: The shard is not whole.
        """

    @abstractmethod
    def take(self, index: int) -> Any:
        """One of them, as it is stored.

        Raises:
            Damage: There is no such sample, or the shard is damaged before it or in it.
        """

    @abstractmethod
    def is_end(self, count: int) -> bool:
        """Whether there are no more than `count`. Cheap after the last of them was taken."""
