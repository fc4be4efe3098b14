"""Whose turn it is: how the samples of several readers become the micro-batches of one rank.

Guarantee: the batches are a pure function of what the readers give. They depend neither on who answers first nor on how
far ahead is asked, and from any mark the same batches follow as without a break. What was asked for and not delivered
is in no mark. Every reader's samples are used in its own order, each once.

The rules. Readers take turns; each gives a batch, or fewer samples where its epoch or its part of a lap ends. When
nobody has more, the rests are put together in the order of the readers; what is then still less than a batch is
completed by the first samples that follow. An epoch is over when every reader's is. Where the length of an epoch is
known, readers have parts of a *lap*: a stream that goes on for ever, epoch after epoch, is then cut where its epochs
are, and one with more samples than its part goes on when the others have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Parts = Callable[[int], Sequence[int] | None]
_NO_LIMIT = 1 << 62


@dataclass(slots=True)
class Mark:
    """Where a rank is after a batch.

    Args:
        epoch: Number of the epoch of the samples that come next.
        turn: The reader whose turn it is.
        taken: Samples of this epoch that each reader gave, `[readers]`.
        lap: Of these, the ones of the present lap, `[readers]`.
        is_overtime: Whether readers go on beyond their parts, since others have ended before theirs.
    """

    epoch: int
    turn: int
    taken: tuple[int, ...]
    lap: tuple[int, ...]
    is_overtime: bool = False

    @classmethod
    def start(cls, epoch: int, readers: int) -> Mark:
        """The beginning of an epoch."""
        return cls(epoch, 0, (0,) * readers, (0,) * readers)

    @property
    def is_start(self) -> bool:
        """Whether nothing of the epoch was taken."""
        return not any(self.taken)

    def copy(self) -> Mark:
        """The same place, which does not move with this one."""
        return Mark(self.epoch, self.turn, self.taken, self.lap, self.is_overtime)

    def become(self, epoch: int, taken: tuple[int, ...]) -> None:
        """Moves on to the beginning of a lap, which stands for the same place as the end of the one before."""
        self.epoch, self.turn, self.taken, self.lap, self.is_overtime = epoch, 0, taken, (0,) * len(taken), False


class Ask(NamedTuple):
    """What a reader is asked for: the next samples of an epoch, or as many as are left."""

    number: int
    reader: int
    epoch: int
    samples: int


class Piece(NamedTuple):
    """Samples `start` to `stop` of the answer to the ask `number`."""

    number: int
    reader: int
    start: int
    stop: int
    epoch: int
    lap: int


class Batch(NamedTuple):
    """A micro-batch: the pieces that it is made of, and where the rank is after it."""

    pieces: tuple[Piece, ...]
    mark: Mark


class EmptyEpoch(Exception):
    """All readers reached the end of an epoch, and none of them gave a sample."""


class Turns:
    """Decides who is asked for what, and puts answers together. Answers are entered in the order of the asks.

    Args:
        readers: Number of readers.
        size: Samples of a batch.
        mark: Where to start.
        parts: Samples of each reader in one lap of an epoch, or none where that is not known.
        is_exact: Whether the parts are all that there is: an epoch ends with them.
        drop_after: Samples after which the rest of an epoch is left out, or none.

    Attributes:
        ready: Batches in order, to be taken from the left.
        ended: Epochs that all readers ended, with the number of their samples, to be taken from the left.
        floor: Answers to asks with a smaller number are of use only to the batches that are ready.
    """

    def __init__(
        self,
        readers: int,
        size: int,
        mark: Mark,
        parts: Parts,
        *,
        is_exact: bool = False,
        drop_after: int | None = None,
    ) -> None:
        self.ready: deque[Batch] = deque()
        self.ended: deque[tuple[int, int]] = deque()
        self.floor = 0
        self._readers = readers
        self._size = size
        self._parts = parts
        self._is_exact = is_exact
        self._drop_after = drop_after
        self._asked: dict[int, Ask] = {}  # and not answered
        self._number = 0
        self._epoch, self._lap, self._turn = mark.epoch, 0, mark.turn
        self._given = sum(mark.taken)  # samples of the epoch so far
        self._used, self._used_of_lap, self._asked_of_lap = list(mark.taken), list(mark.lap), list(mark.lap)
        self._carry: list[Piece] = []  # less than a batch, from before this lap
        self._rests: list[list[Piece]] = []  # less than a batch of each reader, of this lap
        self._newest: Mark | None = None
        self._begin_lap()
        self._is_overtime = mark.is_overtime

    def ask(self) -> Ask | None:
        """The next ask, or none before more is answered. It is not made yet: see `made`.

        Raises:
            EmptyEpoch: See there.
        """
        while True:
            found = self._next()
            if found is not None or self._asked:
                return found
            self._close()

    def made(self, ask: Ask) -> None:
        """Enters that an ask has been sent."""
        self._number += 1
        self._asked[ask.number] = ask
        self._asked_of_lap[ask.reader] += ask.samples
        if not self._is_filling:
            self._toward[ask.reader] = (self._toward[ask.reader] + ask.samples) % self._size
        self._turn = (ask.reader + 1) % self._readers

    def answered(self, number: int, count: int, has_ended: bool) -> None:
        """Enters an answer: how many samples, and whether the reader's epoch ended with them.

        Raises:
            EmptyEpoch: See there.
        """
        if number < self.floor:
            return
        ask = self._asked.pop(number)
        self._given += count
        self._has_ended[ask.reader] |= has_ended
        pieces = [Piece(number, ask.reader, 0, count, self._epoch, self._lap)] if count else []
        if self._is_filling:
            self._fill(ask.reader, pieces)
        elif pieces:
            rest = self._rests[ask.reader]
            rest += pieces
            if _samples(rest) == self._size:
                self._rests[ask.reader] = []
                self._emit(rest, ask.reader)
        while not self._asked and self._next() is None and number >= self.floor:
            self._close()

    # -- who is asked ------------------------------------------------------------------------------------------------

    def _next(self) -> Ask | None:
        if self._is_filling:
            if self._asked:
                return None
            missing = self._size - _samples(self._carry)
            return self._first(range(self._place, self._readers), missing)
        order = (*range(self._turn, self._readers), *range(self._turn))
        return self._first(order, self._size)

    def _first(self, order: Sequence[int], size: int) -> Ask | None:
        for reader in order:
            left = self._left(reader)
            if left > 0:
                count = min(left, size - self._toward[reader])
                return Ask(self._number, reader, self._epoch, count)
        return None

    def _left(self, reader: int) -> int:
        if self._has_ended[reader]:
            return 0
        if self._limits is None or self._is_overtime:
            return _NO_LIMIT
        return self._limits[reader] - self._asked_of_lap[reader]

    # -- how answers become batches ----------------------------------------------------------------------------------

    def _fill(self, reader: int, pieces: list[Piece]) -> None:
        self._carry += pieces
        self._place = reader + 1
        if _samples(self._carry) == self._size:
            complete, self._carry = self._carry, []
            self._is_filling = False
            self._turn = (reader + 1) % self._readers
            self._emit(complete, reader)

    def _emit(self, pieces: list[Piece], reader: int) -> None:
        for piece in pieces:
            if piece.epoch == self._epoch:
                self._used[piece.reader] += piece.stop - piece.start
                if piece.lap == self._lap:
                    self._used_of_lap[piece.reader] += piece.stop - piece.start
        turn = (reader + 1) % self._readers
        self._newest = Mark(self._epoch, turn, tuple(self._used), tuple(self._used_of_lap), self._is_overtime)
        self.ready.append(Batch(tuple(pieces), self._newest))
        if self._drop_after is not None and sum(self._used) >= self._drop_after:
            self._carry = []
            self._end_epoch()

    def _close(self) -> None:
        """Nobody has more to give in this lap."""
        if not (self._is_exact or all(self._has_ended)) and any(self._has_ended) and not self._is_overtime:
            self._is_overtime, self._place, self._turn = True, 0, 0
            return
        left = [*self._carry, *(piece for rest in self._rests for piece in rest)]
        self._rests = [[] for _ in range(self._readers)]
        epoch = self._epoch
        while _samples(left) >= self._size and self._epoch == epoch:
            whole, left = _cut(left, self._size)
            self._emit(whole, self._readers - 1)
        if self._epoch != epoch:
            return  # what is left was dropped
        self._carry = left
        if self._is_exact or all(self._has_ended):
            self._end_epoch()
        else:
            self._lap += 1
            self._turn = 0
            self._used_of_lap, self._asked_of_lap = [0] * self._readers, [0] * self._readers
            self._begin_lap()
            self._move_newest()

    def _end_epoch(self) -> None:
        if self._given == 0 and not (self._is_exact and self._limits is not None and not any(self._limits)):
            raise EmptyEpoch
        self.ended.append((self._epoch, self._given))
        self._epoch, self._lap, self._turn, self._given = self._epoch + 1, self._lap + 1, 0, 0
        self._used, self._used_of_lap, self._asked_of_lap = ([0] * self._readers for _ in range(3))
        self.floor = self._number
        self._asked.clear()
        self._begin_lap()
        self._move_newest()

    def _begin_lap(self) -> None:
        self._has_ended = [False] * self._readers
        self._rests = [[] for _ in range(self._readers)]
        self._toward = [0] * self._readers  # of a batch: samples that each was asked for
        self._limits = self._parts(self._epoch)
        self._is_overtime = False
        self._is_filling, self._place = bool(self._carry), 0

    def _move_newest(self) -> None:
        """With nothing left over, the end of a lap is the beginning of the next."""
        if not self._carry and self._newest is not None:
            self._newest.become(self._epoch, tuple(self._used))


def _samples(pieces: Sequence[Piece]) -> int:
    total = 0
    for piece in pieces:
        total += piece.stop - piece.start
    return total


def _cut(pieces: Sequence[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The first `count` samples, and the rest."""
    first: list[Piece] = []
    for index, piece in enumerate(pieces):
        length = piece.stop - piece.start
        if count <= length:
            first.append(piece._replace(stop=piece.start + count))
            rest = [piece._replace(start=piece.start + count)] if count < length else []
            return first, [*rest, *pieces[index + 1 :]]
        first.append(piece)
        count -= length
    return first, []
