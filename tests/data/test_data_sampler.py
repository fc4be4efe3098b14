"""Orders of somebody else's sampler: each epoch's own, never divided twice, and the same wherever a run begins."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cropped_sets import Cropped
from data_sets import Numbers
from test_data_loader import fingerprints
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from framework.data import DataLoader, seeding
from framework.errors import ConfigError, DataError

SAMPLES = 36


class Wrapped(Sampler[int]):
    """Somebody's own sampler around another one, as users write them."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Shuffled(Wrapped):
    """One that draws from every kind of generator, the process's and its own, and forgets nothing."""

    def __init__(self, samples: int) -> None:
        super().__init__(range(samples))
        self.own = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.inner)).tolist()
        random.shuffle(order)
        return iter(self.own.permutation(np.random.permutation(order)))


def distributed(rank: int, world: int) -> Any:
    return DistributedSampler(Numbers(SAMPLES), num_replicas=world, rank=rank, seed=5)


MAKERS: dict[str, Any] = {
    "random": lambda rank, world: RandomSampler(Numbers(SAMPLES)),
    "random with its own": lambda rank, world: RandomSampler(Numbers(SAMPLES), generator=torch.Generator()),
    "weighted": lambda rank, world: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False),
    "subset": lambda rank, world: SubsetRandomSampler(range(SAMPLES)),
    "own": lambda rank, world: Shuffled(SAMPLES),
    "distributed": distributed,
    "distributed in another": lambda rank, world: Wrapped(distributed(rank, world)),
    "distributed of one": lambda rank, world: DistributedSampler(Numbers(SAMPLES), num_replicas=1, rank=0),
}


def run(
    make: Any, position: int, steps: int, size: int = 12, world: int = 1, micro: int | None = None, workers: int = 0
) -> list[list[Any]]:
    """Steps of all ranks, each as the samples in the order of the stream."""
    loaders = [
        DataLoader(
            Cropped(SAMPLES), micro or size // world, sampler=make(rank, world), seed=3, global_batch_size=size,
            rank=rank, world_size=world, endless=True, position=position, num_workers=workers,
        )
        for rank in range(world)
    ]  # fmt: skip
    running, taken = [iter(loader) for loader in loaders], []
    for _ in range(steps):
        shares = [
            [s for _ in range(size // world // (micro or size // world)) for s in fingerprints(next(one))]
            for one in running
        ]
        taken.append(list(itertools.chain(*zip(*shares, strict=True))))
    for loader in loaders:
        assert loader.samples == SAMPLES
        loader.close()
    return taken


@pytest.mark.parametrize("name", MAKERS)
def test_each_epoch_is_whole_in_another_order_and_the_same_from_any_beginning(name: str) -> None:
    make = MAKERS[name]
    whole = run(make, 0, 9)
    stream = list(itertools.chain(*whole))
    orders = [tuple(id_ for id_, _ in stream[at : at + SAMPLES]) for at in range(0, 3 * SAMPLES, SAMPLES)]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert len(set(orders)) == 3
    for position in (24, 36, 60):
        assert run(make, position, 3) == whole[position // 12 : position // 12 + 3]
    world = 2
    for position in (0, 24, 60):
        assert run(make, position, 3, world=world, micro=3) == whole[position // 12 : position // 12 + 3]
    assert run(make, 12, 3, world=world, micro=6, workers=1) == whole[1:4]


def test_ranks_have_shares_of_a_distributed_sampler_as_torch_gives_them() -> None:
    for epoch in range(2):
        expected = []
        for rank in range(2):
            theirs = distributed(rank, 2)
            theirs.set_epoch(epoch)
            expected.append(list(theirs))
            loader = DataLoader(
                Numbers(SAMPLES), 4, sampler=distributed(rank, 2), rank=rank, world_size=2, num_workers=0
            )
            loader.seek(epoch * SAMPLES)
            assert [id_ for batch in loader for id_ in batch.tolist()] == expected[-1]
            assert len(loader) == 5
        assert not set(expected[0]) & set(expected[1])


@pytest.mark.parametrize("size", [6, 10, 4])
def test_another_global_batch_or_world_goes_on_at_the_same_sample(size: int) -> None:
    for name in ("own", "distributed"):
        stream = list(itertools.chain(*run(MAKERS[name], 0, 9)))
        for world in (1, 2):
            after = list(itertools.chain(*run(MAKERS[name], 24, 3, size, world)))
            assert after == stream[24 : 24 + 3 * size]
    # A position that is no multiple of the number of ranks.
    after = [sorted(step) for step in run(MAKERS["distributed"], 9, 3, 6, 2)]
    stream = list(itertools.chain(*run(MAKERS["distributed"], 0, 9)))
    assert after == [sorted(stream[at : at + 6]) for at in (9, 15, 21)]


def test_a_share_that_is_padded_is_as_long_as_it_says() -> None:
    loaders = [
        DataLoader(
            Numbers(10), 2, sampler=DistributedSampler(Numbers(10), num_replicas=3, rank=rank), rank=rank, world_size=3,
            num_workers=0,
        )
        for rank in range(3)
    ]  # fmt: skip
    for loader in loaders:
        assert loader.samples == 12
        assert [len(batch) for batch in loader] == [2, 2]


def test_set_epoch_is_called_on_whoever_has_it() -> None:
    class Telling(Wrapped):
        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    inner = Telling(range(8))
    loader = DataLoader(Numbers(8), 4, sampler=Wrapped(Wrapped(inner)), num_workers=0)
    for _ in range(3):
        list(loader)
    assert inner.epochs == [0, 1, 2]


def test_drawing_leaves_no_trace_in_the_process_or_the_sampler() -> None:
    sampler = RandomSampler(Numbers(SAMPLES), generator=torch.Generator().manual_seed(4))
    with seeding.forked(8):
        state = seeding.capture()
        expected, own = torch.rand(3).tolist(), sampler.generator.get_state()
        seeding.restore(state)
        list(DataLoader(Numbers(SAMPLES), 8, sampler=sampler, num_workers=0))
        assert torch.rand(3).tolist() == expected
        assert torch.equal(sampler.generator.get_state(), own)


@pytest.mark.parametrize("world", [1, 2])
def test_batches_of_a_batch_sampler_come_as_they_are(world: int) -> None:
    class ByLength:
        """Batches of different sizes."""

        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(30).tolist()
            yield from (order[start:stop] for start, stop in itertools.pairwise([0, 3, 6, 11, 16, 22, 28, 29, 30]))

    def batches(position: int, epochs: int = 1, workers: int = 0) -> list[list[list[int]]]:
        loaders = [
            DataLoader(
                Numbers(30), batch_sampler=ByLength(), seed=1, rank=rank, world_size=world, position=position,
                num_workers=workers,
            )
            for rank in range(world)
        ]  # fmt: skip
        taken = [[batch.tolist() for _ in range(epochs) for batch in loader] for loader in loaders]
        for loader in loaders:
            assert len(loader) == 8 // world
            loader.close()
        return taken

    whole = batches(0, 2, workers=1)
    rounds = list(zip(*whole, strict=True))
    per_epoch = 8 // world
    for epoch in range(2):
        ids = sorted(itertools.chain(*itertools.chain(*rounds[epoch * per_epoch : (epoch + 1) * per_epoch])))
        assert ids == list(range(30))
    assert rounds[0] != rounds[per_epoch]
    assert batches(6) == [share[2 // world : per_epoch] for share in whole]
    assert batches(30 + 16) == [share[per_epoch + 4 // world :] for share in whole]
    with pytest.raises(DataError, match=r"Position 37 lies within a batch of ByLength: one begins at 36"):
        batches(37)


def test_torchs_batch_sampler_around_a_share_is_used_as_it_is() -> None:
    theirs = BatchSampler(distributed(1, 2), 5, drop_last=False)
    loader = DataLoader(Numbers(SAMPLES), batch_sampler=theirs, rank=1, world_size=2, num_workers=0)
    assert [batch.tolist() for batch in loader] == list(BatchSampler(distributed(1, 2), 5, drop_last=False))
    assert loader.batch_sampler is theirs


class Uneven(Wrapped):
    def set_epoch(self, epoch: int) -> None:
        self.inner = range(8 - epoch)


class Pairs(Wrapped):
    def __iter__(self) -> Iterator[Any]:
        return iter([(0, 1), (2, 3)])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": distributed(0, 4)}, ConfigError, "DistributedSampler gives the share of rank 0 of 4, but this is rank 1 of 2"),
        ({"sampler": Wrapped(distributed(0, 2))}, ConfigError, "share of rank 0 of 2, but this is rank 1 of 2"),
        ({"sampler": SequentialSampler(range(4)), "shuffle": True}, ConfigError, "sampler says the order itself"),
        ({"batch_sampler": [[1]], "batch_size": 2}, ConfigError, "batch_sampler says order and batches itself"),
        ({"batch_sampler": [[1]], "endless": True}, ConfigError, "leave out .* endless"),
        ({"sampler": []}, DataError, "list gives no samples"),
        ({"sampler": [3, 8]}, DataError, "gives the index 8; the dataset has 8 samples"),
        ({"sampler": [-1]}, DataError, "gives the index -1"),
        ({"sampler": Pairs(range(2))}, DataError, r"Pairs gives tuples, such as \(0, 1\). A position needs whole"),
        ({"sampler": Uneven(range(8))}, DataError, "Uneven gives 7 samples in epoch 1 and gave 8 in epoch 0"),
        ({"sampler": Wrapped(3)}, DataError, "Wrapped could not give the order of epoch 0: TypeError"),
    ],
)  # fmt: skip
def test_samplers_that_cannot_be_used_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loader = DataLoader(Numbers(8), rank=1, world_size=2, num_workers=0, **options)
        for _ in range(2):
            list(loader)
