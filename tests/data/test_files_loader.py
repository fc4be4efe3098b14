"""Files through the loader, from a folder and from an object store: each once, from any place, over kills of workers."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from files_support import Decoding, Doubling, Failing, Filtering, as_number, fill, read_number
from support.storage import S3
from test_data_workers import pids

from framework.data import DataLoader, EvalLoader, VolumeDataset
from framework.errors import DataError
from framework.volume import open_volume

COUNT = 37
BATCH = 4


def with_noise(number: Any) -> Any:
    """An augmentation: what a position must determine bit by bit."""
    return number, random.random()


def as_is(samples: list[Any]) -> list[Any]:
    return [(int(number), noise) for number, noise in samples]


def made(kind: str, source: Any, cache: Any) -> Any:
    """The same samples in each of the ways to have them."""
    options = {"label": None, "cache": cache}
    if kind == "by index":
        return VolumeDataset(source, decode=as_number, transform=with_noise, **options)
    files = VolumeDataset(source, decode=None, **options)
    return Decoding(files if kind == "wrapped" else files.paths())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    fill(root, COUNT, classes=3)
    return root


@pytest.fixture(params=["folder", "store"])
def source(request: pytest.FixtureRequest, folder: Path) -> Any:
    if request.param == "folder":
        return folder
    s3: S3 = request.getfixturevalue("s3")
    for path in folder.rglob("*.bin"):
        open_volume(s3.url).put(str(path.relative_to(folder)), path.read_bytes())
    return s3.url


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[Any]:
    """Two epochs of steps, without workers, from a folder."""
    loader = DataLoader(made("by index", folder, False), BATCH, seed=5, endless=True, num_workers=0, collate_fn=as_is)
    return list(itertools.islice(loader, 2 * COUNT // BATCH + 1))


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # killed before, and not replaced yet
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["by index", "wrapped", "paths wrapped"])
def test_any_way_of_loading_gives_the_same_batches_over_places_and_kills(
    source: Any, kind: str, workers: int, reference: list[Any], tmp_path: Path
) -> None:
    small = {"root": tmp_path / "cache", "limit": 10 * 72}  # most files are not taken
    dataset = made(kind, source, small)
    taken: list[Any] = []
    for stop in (5, 11, len(reference)):
        loader = DataLoader(
            dataset, BATCH, seed=5, endless=True, position=len(taken) * BATCH, num_workers=workers, collate_fn=as_is
        )
        batches = iter(loader)
        while len(taken) < stop:
            taken.append(next(batches))
            loader.commit(1)
            if workers and len(taken) in (3, 7, 8):
                kill(pids(loader)[len(taken) % 2])
        loader.close()
    assert taken == reference
    first_epoch = list(itertools.chain.from_iterable(taken))[:COUNT]
    assert sorted(number for number, _ in first_epoch) == list(range(COUNT))


@pytest.mark.parametrize("workers", [0, 2])
def test_paths_straight_through_the_loader_are_there_while_their_batch_is_in_use(
    source: Any, workers: int, reference: list[Any], tmp_path: Path
) -> None:
    """Though the cache takes none of them, and a worker that gave some is killed before they are read."""
    files = VolumeDataset(source, decode=None, label=None, cache={"root": tmp_path / "cache", "limit": 0})
    loader = DataLoader(files.paths(), BATCH, seed=5, endless=True, num_workers=workers)
    batches = iter(loader)
    used: list[list[int]] = []
    for number in range(len(reference)):
        paths = next(batches)
        if workers and number in (2, 9):
            for pid in pids(loader):
                kill(pid)
        used.append([read_number(path) for path in paths])
        loader.commit(1)
    assert used == [[number for number, _ in batch] for batch in reference]
    left = list((tmp_path / "cache").rglob("*.bin"))
    assert len(left) < (2 * 4 * workers + 8) * BATCH + 64  # what is in use or on its way, not two epochs' worth
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_the_files_of_a_step(folder: Path, workers: int, reference: list[Any]) -> None:
    for world in (2, 4):
        shares = []
        for rank in range(world):
            loader = DataLoader(
                made("wrapped", folder, False), BATCH // world, seed=5, endless=True, rank=rank, world_size=world,
                num_workers=workers, collate_fn=as_is,
            )  # fmt: skip
            shares.append(list(itertools.islice(loader, len(reference))))
            loader.close()
        assert [sorted(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == [*map(sorted, reference)]


def test_workers_that_are_not_forked_give_the_same(folder: Path, reference: list[Any]) -> None:
    """As they are once CUDA is in use: the dataset travels as a pickle."""
    loader = DataLoader(
        made("paths wrapped", folder, False), BATCH, seed=5, endless=True, num_workers=1, collate_fn=as_is,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    assert list(itertools.islice(loader, len(reference))) == reference
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_file_once_in_the_order_of_names(folder: Path, workers: int) -> None:
    for kind in ("by index", "wrapped"):
        loader = EvalLoader(made(kind, folder, False), BATCH, num_workers=workers, collate_fn=as_is)
        passes = [list(itertools.chain.from_iterable(loader)) for _ in range(2)]
        files = VolumeDataset(folder, decode=as_number, label=None)
        assert [number for number, _ in passes[0]] == [int(files[index]) for index in range(COUNT)]
        assert passes[0] == passes[1]  # and the same noise
        loader.close()


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("workers", [0, 2])
def test_files_that_cannot_be_decoded_keep_position_and_batch_size(folder: Path, workers: int, on_error: str) -> None:
    files = VolumeDataset(folder, decode=None, label=None)
    loader = DataLoader(Failing(files), BATCH, num_workers=workers, on_error=on_error, seed=1)
    good = [number for number in range(COUNT) if number % 5]
    batches = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [BATCH] * (COUNT // BATCH) + [COUNT % BATCH]
    seen = set(itertools.chain.from_iterable(batches))
    assert seen == set(good)
    assert loader.take_stats().skipped == COUNT - len(good)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_cannot_be_decoded_is_named(folder: Path, workers: int) -> None:
    files = VolumeDataset(folder, decode=None, label=None)
    loader = DataLoader(Failing(files), BATCH, shuffle=False, num_workers=workers)
    with pytest.raises(
        DataError, match=r"PathSamples|Failing.*\(c0/000\.bin\) of epoch 0: ValueError: 000\.bin is dam"
    ):
        list(loader)
    loader.close()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_not_one_to_one_ends_the_epoch_by_name(folder: Path, workers: int, on_error: str) -> None:
    for wrapper in (Filtering, Doubling):
        files = VolumeDataset(folder, decode=None, label=None)
        loader = DataLoader(wrapper(files), BATCH, num_workers=workers, on_error=on_error)
        with pytest.raises(DataError, match=rf"{wrapper.__name__} is not one-to-one"):
            list(loader)
        loader.close()


def test_a_store_is_asked_for_each_file_once_over_epochs_and_restarts(s3: S3, folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*.bin"):
        open_volume(s3.url).put(str(path.relative_to(folder)), path.read_bytes())
    for _ in range(2):
        dataset = VolumeDataset(s3.url, decode=as_number, label=None, cache={"root": tmp_path / "cache", "min_free": 0})
        loader = DataLoader(dataset, BATCH, num_workers=2)
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(COUNT))
        loader.close()
    read = [path for method, path in s3.proxy.log if method == "GET" and path.endswith(".bin")]
    assert len(read) == len(set(read)) == COUNT


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_answers_503_now_and_then_loses_nothing(
    s3: S3, folder: Path, workers: int, tmp_path: Path
) -> None:
    for path in folder.rglob("*.bin"):
        open_volume(s3.url).put(str(path.relative_to(folder)), path.read_bytes())
    dataset = VolumeDataset(s3.url, decode=as_number, label=None, cache=False)
    s3.proxy.fail(503, count=6, method="GET", path="*.bin*")
    loader = DataLoader(dataset, BATCH, num_workers=workers)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(COUNT))
    assert loader.take_stats().retries == 6
    loader.close()
