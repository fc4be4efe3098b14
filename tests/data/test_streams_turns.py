"""Turns: the batches of a rank out of several readers, with nobody's timing in them."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest

from framework.data.streams.turns import Batch, EmptyEpoch, Mark, Turns

Sample = tuple[int, int, int]  # epoch, reader, index in its epoch


class Readers:
    """Readers with so many samples an epoch each, or without end; they answer when `random` says so."""

    def __init__(self, sizes: Sequence[int | None], mark: Mark, chance: random.Random) -> None:
        self.sizes = sizes
        self.given = [(mark.epoch, taken) for taken in mark.taken]
        self.chance = chance

    def answer(self, reader: int, epoch: int, count: int) -> tuple[list[Sample], bool]:
        at_epoch, taken = self.given[reader]
        if at_epoch != epoch:
            taken = 0
        size = self.sizes[reader]
        stop = taken + count if size is None else min(size, taken + count)
        self.given[reader] = (epoch, stop)
        return [(epoch, reader, index) for index in range(taken, stop)], stop == size


def deliver(
    sizes: Sequence[int | None], size: int, batches: int, mark: Mark, seed: int, **options: Any
) -> list[tuple[list[Sample], Mark]]:
    """So many batches, asked for as far ahead and answered as late as chance wants."""
    chance = random.Random(seed)
    parts = options.pop("parts", None)
    turns = Turns(len(sizes), size, mark, lambda epoch: parts, **options)
    readers = Readers(sizes, mark, chance)
    asked: deque[Any] = deque()
    answers: dict[int, list[Sample]] = {}
    made: list[tuple[Batch, list[Sample]]] = []
    while len(made) < batches:
        while turns.ready:
            batch = turns.ready.popleft()
            samples = [one for piece in batch.pieces for one in answers[piece.number][piece.start : piece.stop]]
            made.append((batch, samples))
        while len(asked) < 6 and (not asked or chance.random() < 0.7) and (ask := turns.ask()) is not None:
            turns.made(ask)
            asked.append(ask)
        if asked:
            ask = asked.popleft()
            answers[ask.number], has_ended = readers.answer(ask.reader, ask.epoch, ask.samples)
            turns.answered(ask.number, len(answers[ask.number]), has_ended)
    return [(samples, batch.mark) for batch, samples in made[:batches]]


def copied(mark: Mark) -> Mark:
    return Mark(mark.epoch, mark.turn, mark.taken, mark.lap, mark.is_overtime)


CASES = [
    ([10], 4, None),
    ([5, 5], 4, [5, 5]),
    ([12, 8], 4, [10, 10]),
    ([12, 8], 4, None),
    ([16, 8], 8, [12, 12]),
    ([2, 1], 8, None),
    ([2, 1], 8, [2, 1]),
    ([1, 0, 9], 4, [4, 3, 3]),
    ([0, 7], 3, None),
    ([11, 11], 4, [10, 10]),
    ([7, 13, 10, 1], 5, [8, 8, 8, 7]),
]


@pytest.mark.parametrize(("sizes", "size", "parts"), CASES)
def test_each_sample_comes_once_in_each_epoch(sizes: list[int], size: int, parts: list[int] | None) -> None:
    total = sum(sizes)
    made = deliver(sizes, size, -(-5 * total // size), Mark.start(0, len(sizes)), 1, parts=parts)
    flat = [sample for samples, _ in made for sample in samples]
    assert all(len(samples) == size for samples, _ in made)
    for epoch in range(5):
        expected = {(epoch, reader, index) for reader, count in enumerate(sizes) for index in range(count)}
        assert set(flat[epoch * total : (epoch + 1) * total]) == expected
    assert [epoch for epoch, _, _ in flat] == sorted(epoch for epoch, _, _ in flat)


def test_from_every_mark_the_same_batches_follow_whoever_answers_first() -> None:
    for seed in range(100):
        chance = random.Random(seed)
        readers = chance.randint(1, 4)
        sizes: list[int | None] = [chance.choice([0, 1, 3, 8, 9, 17]) for _ in range(readers)]
        sizes[chance.randrange(readers)] = 12
        if chance.random() < 0.2:
            sizes = [None] * readers
        size = chance.randint(1, 9)
        parts = chance.choice([None, [chance.randint(1, 15) for _ in range(readers)]])
        drop = chance.choice([None, None, size]) if None not in sizes else None
        options = {"parts": parts, "drop_after": drop}
        whole = deliver(sizes, size, 30, Mark.start(0, readers), seed, **options)
        for at in (0, 3, 11, 12, 13, 20):
            rest = deliver(sizes, size, 29 - at, copied(whole[at][1]), seed + at + 1, **options)
            assert [samples for samples, _ in rest] == [samples for samples, _ in whole[at + 1 :]], (seed, at)


def test_streams_without_end_are_cut_where_their_epochs_are() -> None:
    made = deliver([None, None], 4, 15, Mark.start(0, 2), 3, parts=[10, 10])
    flat = [sample for samples, _ in made for sample in samples]
    for lap in range(3):
        counts = Counter(reader for _, reader, index in flat[20 * lap : 20 * lap + 20] if index // 10 == lap)
        assert counts == {0: 10, 1: 10}


def test_the_end_of_an_epoch_is_marked_as_the_beginning_of_the_next() -> None:
    made = deliver([8, 4], 4, 4, Mark.start(0, 2), 1, parts=[6, 6])  # one more: it is found when they go on
    assert made[2][1] == Mark.start(1, 2)
    made = deliver([8, 5], 4, 3, Mark.start(0, 2), 1, drop_after=12)
    assert made[2][1] == Mark.start(1, 2)


def test_exact_parts_end_an_epoch_though_no_reader_says_so() -> None:
    made = deliver([None, None], 4, 5, Mark.start(0, 2), 1, parts=[5, 5], is_exact=True)
    flat = [sample for samples, _ in made for sample in samples]
    assert Counter(epoch for epoch, _, _ in flat) == {0: 10, 1: 10}


def test_readers_without_samples_are_no_endless_loop() -> None:
    with pytest.raises(EmptyEpoch):
        deliver([0, 0], 4, 1, Mark.start(0, 2), 1)
