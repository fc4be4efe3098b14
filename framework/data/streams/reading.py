"""From the answers of readers to the batches of a rank, and the books of what of them was trained.

Guarantee: the place after the last committed batch is known at any time, whatever was asked for ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from framework.data.delivery import Delivery
from framework.data.device import pin
from framework.data.position import Token
from framework.data.receipt import Receipt
from framework.data.seeding import kept
from framework.data.streams.answering import Answer, StreamFetch, Task
from framework.data.streams.places import RankPlace
from framework.data.streams.reader import Place
from framework.data.streams.sources import Source
from framework.data.streams.turns import Ask, Batch, EmptyEpoch, Mark, Turns
from framework.errors import DataError

States = deque[tuple[int, int, bytes]]  # epoch, samples that were given, state of the dataset


@dataclass(slots=True)
class _Held:
    """Samples that have come, and how many of them are still to be delivered."""

    given: Any
    answer: Answer
    left: int


class Reading:
    """Batches from a place on. Not thread-safe.

    Args:
        fetch: What the readers are.
        source: Who does their tasks.
        turns: Whose turn it is.
        place: Where it starts.
        delivery: The books.
        batch_size: Samples of a batch.
        depth: Batches that are prepared ahead, the one that is waited for among them.
        place_of: The place of a reader where it begins with an epoch.
        is_there: Whether the readers have been brought to the place already.
        is_pinned: Whether batches come in page-locked memory.

    Attributes:
        committed: Where the rank is after what was trained.
    """

    def __init__(
        self, fetch: StreamFetch, source: Source, turns: Turns, place: RankPlace, delivery: Delivery, *,
        batch_size: int, depth: int, place_of: Callable[[int, int], Place], is_there: bool, is_pinned: bool,
    ) -> None:  # fmt: skip
        self.committed = place.mark
        self.turns = turns
        self._fetch = fetch
        self._source = source
        self._delivery = delivery
        self._depth = depth
        self._place_of = place_of
        self._is_pinned = is_pinned
        self._whole = Token(0, 1, batch_size)
        self._epochs = [place.mark.epoch if is_there else -1] * source.readers  # that each reader was sent to
        self._asked: deque[tuple[int, Ask]] = deque()
        self._held: dict[int, _Held] = {}
        self._marks: deque[Mark] = deque()  # of batches that were handed out and not committed
        self._states: list[States] = [
            deque([] if state is None else [(place.mark.epoch, *state)])
            for state in place.states or [None] * source.readers
        ]
        if not is_there:
            source.clear()

    def next(self) -> Any:
        """The next batch.

        Raises:
            DataError: A reader failed.
        """
        turns, source = self.turns, self._source
        while self._asked and source.is_here(self._asked[0][0]):
            self._enter()
        self._ask()
        while not turns.ready:
            self._enter()
            self._ask()
        return self._handed_out(turns.ready.popleft())

    def is_ready(self) -> bool:
        """Whether `next` would not wait for a reader."""
        return bool(self.turns.ready) or (bool(self._asked) and self._source.is_here(self._asked[0][0]))

    def commit(self, batches: int) -> list[Receipt]:
        """Enters that the next `batches` batches that were handed out were trained; returns their receipts."""
        receipts = self._delivery.commit(batches)
        for _ in range(batches):
            self.committed = self._marks.popleft()
        return receipts

    def states(self) -> list[tuple[int, bytes] | None]:
        """The newest state of each reader's dataset that is not beyond what was committed."""
        mark, found = self.committed, []
        for reader, states in enumerate(self._states):
            fitting = [(at, state) for epoch, at, state in states if epoch == mark.epoch and at <= mark.taken[reader]]
            found.append(fitting[-1] if fitting else None)
        return found

    def _ask(self) -> None:
        turns = self.turns
        try:
            while len(self._asked) + len(turns.ready) < self._depth and (ask := turns.ask()) is not None:
                place = None
                if self._epochs[ask.reader] != ask.epoch:
                    self._epochs[ask.reader] = ask.epoch
                    place = self._place_of(ask.epoch, ask.reader)
                number = self._source.send(ask.reader, Task(ask.epoch, ask.samples, place))
                turns.made(ask)
                self._asked.append((number, ask))
        except EmptyEpoch:
            raise self._empty() from None

    def _enter(self) -> None:
        number, ask = self._asked.popleft()
        given, answer = self._source.wait(number)
        if ask.number < self.turns.floor:  # the epoch was cut short meanwhile
            return
        if answer.samples:
            self._held[ask.number] = _Held(given, answer, answer.samples)
        if answer.state is not None:
            self._note(ask, answer)
        try:
            self.turns.answered(ask.number, answer.samples, answer.has_ended)
        except EmptyEpoch:
            raise self._empty() from None

    def _note(self, ask: Ask, answer: Answer) -> None:
        assert answer.state is not None
        states, mark = self._states[ask.reader], self.committed
        states.append((ask.epoch, answer.at, answer.state))
        done = (mark.epoch, mark.taken[ask.reader])
        while len(states) > 1 and (states[1][0], states[1][1]) <= done:
            states.popleft()

    def _handed_out(self, batch: Batch) -> Any:
        self._marks.append(batch.mark)
        parts = [self._held[piece.number] for piece in batch.pieces]
        if parts[0].answer.is_whole:
            made = parts[0].given
        else:
            samples = [
                sample
                for piece, held in zip(batch.pieces, parts, strict=True)
                for sample in held.given[piece.start : piece.stop]
            ]
            with kept():
                made = self._fetch.collate(samples)
            made = pin(made) if self._is_pinned else made
        self._book(batch, parts)
        return made

    def _book(self, batch: Batch, parts: list[_Held]) -> None:
        delivery = self._delivery
        has_news = delivery.keeps_receipts or any(held.answer.replaced for held in parts)
        receipt = _receipt(batch, parts) if has_news else None
        for piece, held in zip(batch.pieces, parts, strict=True):
            held.left -= piece.stop - piece.start
            if not held.left:
                if held.answer.stats is not None:
                    delivery.stats.add(held.answer.stats)
                del self._held[piece.number]
        delivery.hand_out(delivery.number, self._whole, receipt)

    def drop_unused(self) -> None:
        """Forgets samples that were left out at the end of an epoch."""
        wanted = {piece.number for batch in self.turns.ready for piece in batch.pieces}
        for number in [one for one in self._held if one < self.turns.floor and one not in wanted]:
            del self._held[number]

    def _empty(self) -> DataError:
        name = type(self._fetch.dataset).__name__
        return DataError(
            f"{name} gave no sample in a whole epoch to this rank's {self._source.readers} readers. Either there are "
            "fewer shards or files than readers, or its __iter__ cannot be called again: make it start anew, or let the "
            "dataset be copied."
        )


def _receipt(batch: Batch, parts: list[_Held]) -> Receipt:
    epochs: list[int] = []
    ids: list[int] = []
    replaced: dict[int, tuple[int, str]] = {}
    for piece, held in zip(batch.pieces, parts, strict=True):
        for place, what in held.answer.replaced.items():
            if piece.start <= place < piece.stop:
                replaced[len(ids) + place - piece.start] = what
        ids += held.answer.ids[piece.start : piece.stop]
        epochs += [piece.epoch] * (piece.stop - piece.start)
    receipt = Receipt(np.asarray(epochs, dtype=np.int64), np.asarray(ids, dtype=np.int64), replaced)
    receipt.stats.samples = len(epochs)
    return receipt
