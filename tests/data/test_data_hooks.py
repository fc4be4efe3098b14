"""What a dataset is told while it is loaded: what comes, what is done with, and what it counted."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from data_sets import Numbers, as_list
from test_data_workers import pids
from torch.utils.data import Dataset, Subset

from framework.data import DataLoader, EvalLoader
from framework.data.stats import DataStats
from framework.errors import ConfigError, DataError


class Told(Dataset[Any]):
    """Each sample is what the dataset has been told in this process by then: index, announced, retired, cancelled."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.announced: list[int] = []
        self.retired = self.cancelled = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return index, list(self.announced), self.retired, self.cancelled

    def prefetch(self, indices: Sequence[int]) -> None:
        assert all(type(index) is int for index in indices)
        self.announced += indices

    def cancel_prefetch(self) -> None:
        self.cancelled += 1
        self.announced = []

    def retire(self, count: int) -> None:
        self.retired += count


def loader_of(dataset: Any, workers: int, **options: Any) -> DataLoader:
    return DataLoader(
        dataset, 3, global_batch_size=6, world_size=2, rank=1, num_workers=workers, endless=True, collate_fn=as_list,
        **options,
    )  # fmt: skip


def check_announced(batches: list[Any], workers: int, look_ahead: int) -> None:
    """Each worker knows its own next batches, in their order, and no more."""
    for worker in range(workers):
        asked = [[each[0] for each in batch] for batch in batches[worker::workers]]
        for number, batch in enumerate(batches[worker::workers]):
            announced = batch[0][1]
            expected = list(itertools.chain(*asked[: number + 1 + look_ahead]))
            assert announced[: len(expected)] == expected[: len(announced)]
            assert len(announced) >= 3 * (number + 1 + look_ahead)


@pytest.mark.parametrize(("workers", "prefetch", "look_ahead"), [(0, None, 5), (1, 2, 1), (2, 1, 3), (2, 4, 8)])
def test_a_dataset_knows_what_comes_and_in_which_order(workers: int, prefetch: int | None, look_ahead: int) -> None:
    loader = loader_of(Told(50), workers, prefetch_factor=prefetch, look_ahead=look_ahead)
    batches = iter(loader)
    check_announced([next(batches) for _ in range(40)], workers or 1, look_ahead)
    loader.seek(600)
    after = [next(batches) for _ in range(30)]
    assert {each[3] for batch in after for each in batch} == {
        2 if workers == 0 else 1
    }  # it was told to forget the rest
    check_announced(after, workers or 1, look_ahead)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_by_default_eight_batches_are_known_ahead_and_zero_means_none(workers: int) -> None:
    for look_ahead, known in ((None, 9), (0, 0)):
        loader = loader_of(Told(500), workers, look_ahead=look_ahead)
        assert len(next(iter(loader))[0][1]) >= 3 * known
        assert (known == 0) == (len(next(iter(loader))[0][1]) == 0)
        loader.close()
    assert DataLoader(Numbers(4)).look_ahead == 0  # nobody who would listen


def test_the_end_of_an_epoch_ends_what_is_announced() -> None:
    for workers in (0, 2):
        loader = DataLoader(Told(10), 2, shuffle=False, num_workers=workers, collate_fn=as_list)
        for _ in range(2):
            batches = list(loader)
            assert [each[0] for batch in batches for each in batch] == list(range(10))
        loader.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_are_in_use_until_their_batch_is_committed(workers: int) -> None:
    loader = loader_of(Told(50), workers, prefetch_factor=2)
    batches = iter(loader)
    for _ in range(4):
        assert all(each[2] == 0 for batch in itertools.islice(batches, 3) for each in batch)
    loader.commit(10)
    after = [next(batches) for _ in range(12)]
    retired = [
        max(each[2] for batch in after[worker :: workers or 1] for each in batch) for worker in range(workers or 1)
    ]
    assert sum(retired) == 30
    loader.seek(0)  # what was handed out is given up, and what was only loaded too
    after = [next(batches) for _ in range(2)]
    assert sum(batch[0][2] for batch in after[: workers or 1]) >= 3 * 24
    loader.close()


@pytest.mark.parametrize("kind", [DataLoader, EvalLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_plain_loop_all_but_the_last_two_batches_are_done_with(kind: Any, workers: int) -> None:
    loader = kind(Told(60), 2, num_workers=workers, prefetch_factor=1 if workers else None, collate_fn=as_list)
    retired = [batch[0][2] for _ in range(2) for batch in loader]
    behind = 2 if workers == 0 else 3  # a worker hears of it with its next task
    assert all(2 * (number - behind) <= count <= max(0, 2 * (number - 1)) for number, count in enumerate(retired))
    assert retired[-1] >= 2 * (60 - behind - 1)
    loader.close()


def test_a_worker_in_the_place_of_a_dead_one_is_told_anew() -> None:
    loader = loader_of(Told(500), 2, look_ahead=4, prefetch_factor=2)
    batches = iter(loader)
    taken = [next(batches) for _ in range(9)]
    os.kill(pids(loader)[0], signal.SIGKILL)
    taken += [next(batches) for _ in range(20)]
    first = next(number for number, batch in enumerate(taken[10::2]) if len(batch[0][1]) < len(taken[8][0][1]))
    renewed = taken[10 + 2 * first :: 2]
    asked = [each[0] for batch in renewed for each in batch]
    for number, batch in enumerate(renewed[:6]):
        known = batch[0][1]
        assert known[: len(asked)] == asked[: len(known)] and len(known) >= 3 * (number + 5)
    loader.close()


class Counting(Told):
    """Counts a hit for each sample, in the process that loads it."""

    stats = DataStats()

    def __getitem__(self, index: int) -> Any:
        self.stats.cache_hits += 1
        self.stats.add_read(0.25)
        return super().__getitem__(index)

    def take_stats(self) -> DataStats:
        return self.stats.take()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_subset", [False, True])
def test_counts_of_all_workers_are_added_up_for_what_was_handed_out(workers: int, is_subset: bool) -> None:
    dataset: Any = Subset(Counting(500), range(100, 400)) if is_subset else Counting(500)
    loader = loader_of(dataset, workers)
    batches = iter(loader)
    for count in (4, 7):
        for _ in range(count):
            next(batches)
        stats = loader.take_stats()
        assert (stats.samples, stats.cache_hits) == (3 * count, 3 * count)
        assert stats.read_seconds(0.5) == pytest.approx(0.25, rel=0.1)
    assert loader.take_stats() == DataStats()
    loader.close()
    plain = loader_of(Numbers(50), workers)
    next(iter(plain))
    assert plain.take_stats() == DataStats(samples=3)
    plain.close()


def test_a_subset_tells_the_dataset_inside_its_own_indices() -> None:
    inside = Told(100)
    loader = DataLoader(Subset(Subset(inside, range(50, 90)), [5, 7, 9, 11]), 2, shuffle=False, num_workers=0)
    loader.collate_fn = as_list
    next(iter(loader))
    assert inside.announced == [55, 57, 59, 61]


def test_an_order_of_the_datasets_own_is_followed_in_training_and_not_in_evaluation() -> None:
    class Backwards(Numbers):
        def stream_ids(self, seed: int, start: int, stride: int, count: int) -> tuple[Any, Any]:
            positions = start + stride * np.arange(count)
            return positions // 10 + 7, 9 - positions % 10

    loader = DataLoader(Backwards(10), 4, num_workers=0, endless=True)
    loader.wants_receipts = True
    ids = [id_ for batch in itertools.islice(iter(loader), 5) for id_ in batch.tolist()]
    assert ids == list(range(9, -1, -1)) * 2
    receipts = loader.commit(5)
    assert [epoch for receipt in receipts for epoch in receipt.epochs.tolist()] == [7] * 10 + [8] * 10
    assert loader.ids(4).tolist() == [5, 4, 3, 2]
    assert [id_ for batch in EvalLoader(Backwards(10), 4, num_workers=0) for id_ in batch.tolist()] == list(range(10))
    plain = DataLoader(Backwards(10), 4, shuffle=False, num_workers=0)
    assert [id_ for batch in plain for id_ in batch.tolist()] == list(range(10))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_fails_to_take_note_is_named(workers: int) -> None:
    class Deaf(Numbers):
        def prefetch(self, indices: Sequence[int]) -> None:
            raise OSError("no room")

    loader = DataLoader(Deaf(10), 2, num_workers=workers)
    with pytest.raises(DataError, match=r"Deaf.prefetch failed: OSError: no room.*look_ahead=0 switches it off"):
        next(iter(loader))
    with pytest.raises(ConfigError, match=r"loader.look_ahead=-1 must be from 0"):
        DataLoader(Deaf(10), 2, look_ahead=-1)
    assert len(list(DataLoader(Deaf(10), 2, num_workers=workers, look_ahead=0))) == 5


def test_the_surface_of_a_position_of_one_integer() -> None:
    loader = DataLoader(Numbers(10), 2, num_workers=0)
    assert (loader.samples, loader.strategy, loader.state(), loader.wants_receipts) == (10, "offset", {}, False)
    loader.load_state([{}, {}, {}], 4)
    loader.seek(4)
    assert len(list(loader)) == 3


NAMES = ("sample_key", "prefetch", "cancel_prefetch", "retire", "take_stats", "stream_ids", "fetch_many")


@pytest.mark.parametrize("workers", [0, 1])
def test_values_of_the_same_names_are_no_methods(workers: int) -> None:
    dataset = Numbers(6)
    for name in NAMES:
        setattr(dataset, name, 4)
    loader = DataLoader(dataset, 3, shuffle=False, num_workers=workers, look_ahead=2)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    loader.close()


class Twice:
    """Everything of another dataset, each sample twice; whatever else that one can do is handed on as it is."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 2 * len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return -self.dataset[index // 2]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Refusing(Numbers):
    """Knows no index but its own."""

    def sample_key(self, index: int) -> str:
        return f"{range(self.samples)[index]}.jpg"

    def prefetch(self, indices: Sequence[int]) -> None:
        assert all(index < self.samples for index in indices)

    def fetch_many(self, epoch: int, ids: Sequence[int]) -> Any:
        return [self[index] for index in ids]


def test_a_wrapper_that_hands_on_all_that_it_lacks_is_loaded_by_its_own_index() -> None:
    batches = DataLoader(Twice(Refusing(3)), 6, shuffle=False, num_workers=0)
    assert [batch.tolist() for batch in batches] == [[0, 0, -1, -1, -2, -2]]
