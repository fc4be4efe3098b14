"""The promise of the loaders: the samples are a function of the position, whoever loads them."""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from augmented_sets import Augmented, Keyed
from cropped_sets import Cropped
from data_sets import Numbers, as_list
from torch.utils.data import IterableDataset, Subset

from framework.data import DataLoader, EvalLoader, seeding, to_device
from framework.data.position import advance
from framework.errors import ConfigError, DataError

SAMPLES = 53


def fingerprints(batch: dict[str, Any]) -> list[tuple[int, str]]:
    """Id and digest of each sample of a collated batch."""
    rows = zip(batch["index"].tolist(), batch["picture"], *batch["drawn"], strict=True)
    return [
        (index, hashlib.md5(b"".join(each.numpy().tobytes() for each in values)).hexdigest()) for index, *values in rows
    ]


def run_steps(
    position: int, steps: int, size: int, *, world: int = 1, micro: int | None = None, workers: int = 0,
    epoch_end: str = "carry", dataset: Any = None, method: str | None = None,
) -> tuple[int, list[list[tuple[int, str]]]]:  # fmt: skip
    """Takes steps with all ranks from a position, as an attempt that begins there. Returns the position after them."""
    micro = micro or size // world
    loaders = [
        DataLoader(
            dataset or Augmented(SAMPLES), micro, seed=4, global_batch_size=size, rank=rank, world_size=world,
            epoch_end=epoch_end, position=position, endless=True, num_workers=workers, multiprocessing_context=method,
        )
        for rank in range(world)
    ]  # fmt: skip
    running = [iter(loader) for loader in loaders]
    taken = []
    for _ in range(steps):
        samples = [fingerprints(next(each)) for each in running for _ in range(size // world // micro)]
        assert sorted(id_ for id_, _ in itertools.chain(*samples)) == sorted(loaders[0].ids(position).tolist())
        taken.append(sorted(itertools.chain(*samples)))
        position = advance(position, size, SAMPLES, epoch_end)
    for loader in loaders:
        loader.close()
    return position, taken


@pytest.mark.parametrize("sizes", [[12] * 14, [12, 12, 6, 6, 24, 4, 30, 12, 12, 25, 16]])
def test_every_sample_comes_once_an_epoch_and_differently_in_the_next(sizes: list[int]) -> None:
    position, seen = 0, []
    for size in sizes:  # the second list changes the global batch in the middle of epochs
        position, taken = run_steps(position, 1, size, workers=0)
        seen += taken[0]
    assert position == sum(sizes) == len(seen) >= 3 * SAMPLES
    # The boundary lies inside a batch, so count over three whole epochs: each sample thrice, never twice the same.
    epochs = DataLoader(Augmented(SAMPLES), 1, seed=4, endless=True, position=0, num_workers=0)
    stream = [each for batch in itertools.islice(epochs, 3 * SAMPLES) for each in fingerprints(batch)]
    assert sorted(id_ for id_, _ in stream) == sorted(list(range(SAMPLES)) * 3)
    assert len({digest for _, digest in stream}) == 3 * SAMPLES
    assert set(stream) <= set(seen)
    orders = [[id_ for id_, _ in stream[at : at + SAMPLES]] for at in range(0, 3 * SAMPLES, SAMPLES)]
    assert orders[0] != orders[1] != orders[2]


def test_drop_leaves_out_the_rest_of_an_epoch_and_steps_stay_whole() -> None:
    position, taken = run_steps(0, 5, 12, epoch_end="drop")
    assert position == SAMPLES + 12
    assert len({id_ for step in taken[:4] for id_, _ in step}) == 48
    assert all(len(step) == 12 for step in taken)


def test_a_step_may_span_several_epochs_of_few_samples() -> None:
    loader = DataLoader(Numbers(5), 12, global_batch_size=12, endless=True, num_workers=0)
    ids = [id_ for batch in itertools.islice(loader, 5) for id_ in batch.tolist()]
    assert [sorted(ids[at : at + 5]) for at in range(0, 60, 5)] == [list(range(5))] * 12


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_of_each_kind_give_the_same_bits_as_none(method: str) -> None:
    dataset = Cropped(SAMPLES)
    reference = run_steps(36, 3, 12, dataset=dataset)
    assert run_steps(36, 3, 12, workers=2, method=method, dataset=dataset) == reference
    if method == "fork":
        assert run_steps(36, 3, 12, world=3, micro=2, workers=1) == run_steps(36, 3, 12)


@pytest.mark.parametrize("workers", [0, 2])
def test_seek_goes_on_elsewhere_in_the_same_iteration(workers: int) -> None:
    loader = DataLoader(Augmented(SAMPLES), 6, seed=4, global_batch_size=12, endless=True, num_workers=workers)
    expected = {p: run_steps(p, 1, 12)[1] for p in (0, 12, 24, 480)}
    batches = iter(loader)
    for position in (0, 480, 12, 12):
        loader.seek(position)
        step = [sorted(fingerprints(next(batches)) + fingerprints(next(batches)))]
        assert step == expected[position]
    next(batches)  # half a step, then back
    loader.seek(24)
    assert [sorted(fingerprints(next(batches)) + fingerprints(next(batches)))] == expected[24]
    loader.close()
    with pytest.raises(ValueError, match="before the first sample"):
        loader.seek(-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_alone_each_iteration_is_one_epoch_in_another_order(workers: int) -> None:
    loader = DataLoader(Augmented(SAMPLES), batch_size=8, seed=1, num_workers=workers)
    epochs = [[each for batch in loader for each in fingerprints(batch)] for _ in range(3)]
    assert len(loader) == 7
    for epoch in epochs:
        assert sorted(id_ for id_, _ in epoch) == list(range(SAMPLES))
    assert len({tuple(id_ for id_, _ in epoch) for epoch in epochs}) == 3
    assert not set(epochs[0]) & set(epochs[1])  # persistent workers know of the new epoch too
    for batch in loader:  # a broken-off epoch is over
        first = fingerprints(batch)
        break
    loader.seek(2 * SAMPLES + 48)
    assert [fingerprints(batch) for batch in loader] == [epochs[2][48:]]
    assert first[0] not in epochs[2]
    loader.close()


def test_it_stands_in_for_torchs_loader() -> None:
    loader = DataLoader(Numbers(10), 4, shuffle=False, drop_last=True, num_workers=0)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (len(loader), loader.batch_size, len(loader.dataset), loader.drop_last) == (2, 4, 10, True)
    assert sorted(each for batch in DataLoader(Subset(Numbers(9), [3, 5, 8]), 2, num_workers=0) for each in batch) == [
        3,
        5,
        8,
    ]
    with pytest.raises(TypeError, match="no length"):
        len(DataLoader(Numbers(10), 4, endless=True, num_workers=0))


def test_augmentation_hangs_on_the_key_of_a_sample_not_on_its_index() -> None:
    by_key = []
    for samples in (SAMPLES, SAMPLES + 3):
        dataset = Keyed(samples)
        loader = DataLoader(dataset, 1, num_workers=0, collate_fn=as_list)
        by_key.append({dataset.sample_key(each["index"]): each["drawn"][:2] for batch in loader for each in batch})
    assert len(by_key[1]) == SAMPLES + 3
    assert all(by_key[1][key] == drawn for key, drawn in by_key[0].items())


def test_without_workers_the_generators_of_the_process_stay_as_they_were() -> None:
    with seeding.forked(8):
        random.gauss(0, 1)  # leaves a second value behind for the next call
        np.random.randn()
        state = seeding.capture()
        expected = [random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist()]
        seeding.restore(state)
        loader = DataLoader(Augmented(SAMPLES), 8, num_workers=0)
        batches = iter(loader)
        next(batches)
        failing = DataLoader(Numbers(8, {3: "raise"}), 8, num_workers=0)
        with pytest.raises(DataError):
            list(failing)
        assert [random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist()] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_workers_draws_nothing_from_the_process(workers: int) -> None:
    with seeding.forked(8):
        state = seeding.capture()
        expected = torch.rand(3).tolist()
        seeding.restore(state)
        loader = DataLoader(Augmented(SAMPLES), 8, num_workers=workers)
        list(loader)
        loader.close()
        assert torch.rand(3).tolist() == expected


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (3, 0), (4, 2)])
def test_evaluation_takes_every_sample_once_and_alike_each_time(world: int, workers: int) -> None:
    loaders = [
        EvalLoader(Augmented(SAMPLES), 5, seed=4, rank=r, world_size=world, num_workers=workers) for r in range(world)
    ]
    passes = []
    for _ in range(2):
        shares = [[each for batch in loader for each in fingerprints(batch)] for loader in loaders]
        for rank, share in enumerate(shares):
            assert [id_ for id_, _ in share] == list(range(rank, SAMPLES, world))
        passes.append(sorted(itertools.chain(*shares)))
    assert (
        passes[0]
        == passes[1]
        == sorted(
            each for batch in EvalLoader(Augmented(SAMPLES), 5, seed=4, num_workers=0) for each in fingerprints(batch)
        )
    )
    for loader in loaders:
        assert len(loader) == sum(1 for _ in loader)
        loader.close()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_dataset_without_positions_is_refused_by_its_name() -> None:
    for make in (DataLoader, EvalLoader):
        with pytest.raises(ConfigError, match=r"Stream is no map-style dataset.*loader\.position=offset"):
            make(Stream(), 2)
        with pytest.raises(ConfigError, match="generator is no map-style dataset"):
            make((i for i in range(3)), 2)
        with pytest.raises(DataError, match="empty"):
            make(Numbers(0), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, r"loader\.num_workers=-1"),
        ({"prefetch_factor": 0}, r"loader\.prefetch_factor=0 must be from 1"),
        ({"timeout": 0}, r"loader\.timeout=0"),
        ({"batch_size": 0}, "batch size is 0|at least 1"),
        ({"rank": 2, "world_size": 2}, "Rank 2 is not one of 2 ranks"),
        ({"epoch_end": "wrap"}, "epoch_end='wrap'"),
        ({"batch_size": None}, r"batch_size=None .*collate_fn"),
        ({"generator": torch.Generator()}, "Give seed="),
        ({"in_order": False}, "in_order=False"),
        ({"pin_memory_device": "cuda:1"}, "pin_memory_device='cuda:1'"),
        ({"worker_init_fn": 3}, "worker_init_fn=3 cannot be called"),
    ],
)
def test_numbers_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(Numbers(10), **{"batch_size": 2, **options})
    with pytest.raises(DataError, match="10 samples, fewer than one global batch of 12"):
        DataLoader(Numbers(10), 12, epoch_end="drop")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_sample_names_it_and_shows_the_original(workers: int) -> None:
    class Files(Numbers):
        def sample_key(self, index: int) -> str:
            return f"cat/{index}.jpg"

    loader = DataLoader(Files(10, {3: "raise"}), 4, num_workers=workers)
    with pytest.raises(
        DataError, match=r"Files could not give sample 3 \(cat/3.jpg\) of epoch 0: KeyError: .*such"
    ) as info:
        list(loader)
    assert "no such thing" in str(info.value.__cause__)
    assert ("loader worker" in str(info.value)) == bool(workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_collate_names_the_samples(workers: int) -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index)

    with pytest.raises(DataError, match=r"default_collate could not make a batch of the samples \[0, 1\] of Ragged"):
        list(DataLoader(Ragged(4), 2, shuffle=False, num_workers=workers))


def test_a_batch_moves_to_a_device_with_its_nest() -> None:
    batch = {"x": torch.zeros(2, 3, 4, 5), "y": [torch.ones(2), "name"], "z": (torch.ones(1), 3)}
    moved = to_device(batch, torch.device("meta"), channels_last=True)
    assert moved["x"].device.type == moved["y"][0].device.type == moved["z"][0].device.type == "meta"
    assert moved["x"].is_contiguous(memory_format=torch.channels_last)
    assert (moved["y"][1], moved["z"][1], type(moved["z"])) == ("name", 3, tuple)
    assert to_device(batch["x"], "cpu") is batch["x"]


def test_what_torchs_loader_takes_by_default_may_be_said() -> None:
    said = {"generator": None, "in_order": True, "pin_memory_device": "", "persistent_workers": False}
    for method in ("fork", torch.multiprocessing.get_context("fork")):
        loader = DataLoader(Numbers(4), 2, shuffle=False, num_workers=1, multiprocessing_context=method, **said)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        loader.close()
