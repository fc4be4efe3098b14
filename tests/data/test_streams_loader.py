"""StreamLoader: each sample once in each epoch, and the same batches from every place, with and without workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import stream_sets as sets

from framework.data.streams.loader import StreamLoader

STRATEGIES = {
    sets.Numbers: "fast-forward",
    sets.Counting: "fast-forward",
    sets.Deadly: "fast-forward",
    sets.Cut: "shards",
}


def loader(dataset: Any, batch: int = 4, workers: int = 0, **options: Any) -> StreamLoader:
    """One of a single rank, unless the options say otherwise."""
    options.setdefault("strategy", STRATEGIES.get(type(dataset), "stateful"))
    options.setdefault("samples", len(dataset))
    return StreamLoader(dataset, batch, num_workers=workers, prefetch_factor=2, timeout=60, **options)


def taken(one: StreamLoader, batches: int) -> list[Any]:
    """So many batches, each committed."""
    made = []
    for batch in itertools.islice(one, batches):
        one.commit(1)
        made.append([each.tolist() for each in batch])
    return made


def ids(batches: list[Any]) -> list[int]:
    return [number for batch in batches for number in batch[0]]


DATASETS: dict[str, Callable[[], Any]] = {
    "plain": sets.Numbers,
    "plain, odd": lambda: sets.Numbers(23),
    "counting epochs": sets.Counting,
    "used up": sets.Shards,
    "starting over": lambda: sets.Shards(is_reset=True),
    "late": lambda: sets.Shards(is_late=True),
    "tiny": lambda: sets.Shards((3, 1)),
    "endless": sets.Endless,
    "coarse": sets.Coarse,
    "not to be copied": sets.Uncopied,
    "cut": lambda: sets.Cut(23),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", DATASETS)
def test_each_sample_is_given_once_in_each_of_four_epochs(name: str, workers: int) -> None:
    dataset = DATASETS[name]()
    samples = len(dataset)
    one = loader(dataset, 4, workers)
    try:
        given = ids(taken(one, -(-4 * samples // 4)))
    finally:
        one.close()
    for epoch in range(4):
        assert sorted(given[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", DATASETS)
def test_from_every_place_the_same_batches_follow_bit_for_bit(name: str, workers: int) -> None:
    made = loader(DATASETS[name](), 5, workers)
    places = []
    whole = []
    try:
        for batch in itertools.islice(made, 14):
            made.commit(1)
            whole.append([each.tolist() for each in batch])
            places.append(made.state())
    finally:
        made.close()
    for at in (0, 3, 4, 9):
        again = loader(DATASETS[name](), 5, workers)
        try:
            again.load_state([places[at]], 5 * (at + 1))
            again.seek(5 * (at + 1))
            assert taken(again, 13 - at) == whole[at + 1 :], at
        finally:
            again.close()
