"""Files as a stream of local paths: shares, epochs, places, and what wraps it as samples with an index."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from files_support import (
    Decoding,
    Doubling,
    Ending,
    Failing,
    Filtering,
    Plain,
    ReadingAhead,
    fill,
    read_number,
)
from torch.utils.data import IterableDataset

from framework.data import VolumeDataset
from framework.data.files import PathSamples, PathStream, find_volume, with_index
from framework.data.files.local_paths import LocalPaths
from framework.data.files.stream import rank_of_process
from framework.errors import ConfigError, DataError, StateMismatchError

COUNT = 23


@pytest.fixture
def files(tmp_path: Path) -> VolumeDataset:
    fill(tmp_path / "data", COUNT)
    return VolumeDataset(tmp_path / "data", decode=None, label=None)


def numbers(paths: Any) -> list[int]:
    return [read_number(path) for path in paths]


def stock(dataset: Any, workers: int, batch: int = 4, **options: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=workers, **options)


def flat(loader: Any) -> list[int]:
    return [read_number(path) for batch in loader for path in batch]


def test_an_iteration_gives_each_file_once_in_an_order_of_its_epoch(files: VolumeDataset) -> None:
    epochs = [numbers(files) for _ in range(3)]
    assert [sorted(one) for one in epochs] == [list(range(COUNT))] * 3
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    files.set_epoch(1)
    assert numbers(files) == epochs[1] and numbers(files) == epochs[2]
    assert [numbers(files.paths()) for _ in range(2)] == [epochs[0]] * 2
    assert numbers(files.paths(seed=1)) != epochs[0]
    assert numbers(files.paths(shuffle=False)) == list(range(COUNT))
    assert len(files.paths()) == COUNT


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than there are CPUs
@pytest.mark.parametrize(("workers", "batch"), [([0], 1), ([2, 3], 1), ([2, 3], 3), ([0, 1, 4], 3)])
def test_ranks_with_any_numbers_of_workers_share_the_files(
    files: VolumeDataset, workers: list[int], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(len(workers)))
    seen = []
    for rank, count in enumerate(workers):
        monkeypatch.setenv("RANK", str(rank))
        seen += flat(stock(files.paths(batch_size=batch), count))
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_torchs_own_loader_go_through_the_epochs_too(files: VolumeDataset, persistent: bool) -> None:
    reference = [numbers(files) for _ in range(5)]
    stream = files.paths(batch_size=4)
    loader = stock(stream, 2, persistent_workers=persistent)
    assert [flat(loader) for _ in range(2)] == reference[:2]
    stream.set_epoch(4)
    assert flat(loader) == reference[4]
    stream.load_state_dict({"epoch": 3, "position": 8})
    assert flat(loader) == reference[3][8:]
    assert flat(loader) == reference[4]


def test_a_place_is_taken_up_again_at_the_next_file(files: VolumeDataset) -> None:
    whole = list(itertools.chain.from_iterable(numbers(files) for _ in range(3)))
    files.set_epoch(0)
    for stop in (0, 1, 17, COUNT - 1, COUNT):
        stream = files.paths()
        seen = numbers(stream)
        seen += numbers(itertools.islice(iter(stream), stop))
        state = pickle.loads(pickle.dumps(stream.state_dict()))
        assert (state["epoch"], state["position"]) == ((2, 0) if stop == COUNT else (1, stop))
        resumed = files.paths()
        resumed.load_state_dict(state)
        while len(seen) < len(whole):
            seen += numbers(resumed)
        assert seen == whole


def test_a_place_counts_the_files_of_all_ranks(files: VolumeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen, states = [], []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        stream = files.paths()
        seen += numbers(itertools.islice(iter(stream), 5))
        states.append(stream.state_dict())
    assert states[0] == states[1] and states[0]["position"] == 10
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        stream = files.paths()
        stream.load_state_dict(states[0])
        seen += numbers(stream)
    assert sorted(seen) == list(range(COUNT))


def test_places_that_cannot_be_are_refused(files: VolumeDataset, tmp_path: Path) -> None:
    stream = files.paths()
    with pytest.raises(ConfigError, match="no position 24 of epoch 0 in 23 files"):
        stream.load_state_dict({"epoch": 0, "position": 24})
    with pytest.raises(StateMismatchError, match="seed is 0, and was 7"):
        stream.load_state_dict({"epoch": 0, "position": 0, "seed": 7})
    fill(tmp_path / "other", 3)
    other = VolumeDataset(tmp_path / "other", decode=None, label=None)
    with pytest.raises(StateMismatchError, match="one in other data: files is"):
        stream.load_state_dict(other.state_dict())
    list(stock(stream, 2))
    with pytest.raises(ConfigError, match="Worker processes iterate over these paths"):
        stream.state_dict()
    with pytest.raises(ConfigError, match="batch_size=0"):
        files.paths(batch_size=0)


@pytest.mark.parametrize(
    ("environment", "outcome"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "1"}, "RANK=1 and no WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 and no RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 and WORLD_SIZE=4 are no rank among ranks"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK=x and WORLD_SIZE=4 are no rank among ranks"),
    ],
)
def test_the_rank_is_read_whole_or_refused(
    environment: dict[str, str], outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(outcome, tuple):
        assert rank_of_process() == outcome
    else:
        with pytest.raises(ConfigError, match=outcome):
            rank_of_process()


def test_the_rank_is_read_when_an_iteration_begins(files: VolumeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = files.paths(shuffle=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert numbers(stream) == list(range(1, COUNT, 2))


# -- around torch's own loader -----------------------------------------------------------------------------------------


def test_files_that_the_cache_does_not_take_are_there_until_their_batch_was_used(tmp_path: Path) -> None:
    """Workers end before their last batches are used, and nothing piles up over the epochs."""
    fill(tmp_path / "data", 60)
    cache = {"root": tmp_path / "cache", "limit": 20 * 72}
    files = VolumeDataset(tmp_path / "data", decode=None, label=None, cache=cache)
    kept = []
    for _ in range(5):
        assert sorted(flat(stock(files.paths(batch_size=4), 2))) == list(range(60))
        kept.append(sum(len(found) for _, _, found in os.walk(tmp_path / "cache" / "data")))
    assert kept[0] >= 60 and max(kept) <= kept[0]


def test_the_oldest_paths_go_where_nobody_says_what_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "data", COUNT)
    files = VolumeDataset(tmp_path / "data", decode="path", label=None, cache={"root": tmp_path / "c", "limit": 0})
    files.local_paths.kept = 5
    paths = [files[index] for index in range(COUNT)]
    assert [os.path.exists(path) for path in paths] == [False] * (COUNT - 5) + [True] * 5
    files.retire(0)  # from now on somebody does
    paths = paths[-5:] + [files[index] for index in range(COUNT - 5)]
    assert all(map(os.path.exists, paths))
    files.retire(len(paths))
    assert not any(map(os.path.exists, paths))


# -- as samples with an index ------------------------------------------------------------------------------------------


def test_what_wraps_the_paths_gives_the_samples_that_are_asked_for(files: VolumeDataset) -> None:
    for wrapper in (Plain(files), Plain(files.paths()), Plain(files.path_stream())):
        samples = PathSamples(wrapper)
        assert len(samples) == COUNT and samples.fingerprint == files.fingerprint
        assert list(samples.fetch_many(0, [5, 3, 3])) == [5, 3, 3]
        assert list(samples.fetch_many(7, [22])) == [22] and samples[4] == 4
        assert numbers(files) and sorted(numbers(files)) == list(range(COUNT))  # alone it is as it was
    assert [read_number(path) for path in PathSamples(files.paths()).fetch_many(0, [9, 1])] == [9, 1]


@pytest.mark.parametrize(
    ("wrapper", "ids", "message"),
    [
        (Filtering, [1, 2, 3, 4], "Filtering is not one-to-one: it took more than 4 paths for 4 samples"),
        (Doubling, [1, 2, 3, 4], "Doubling is not one-to-one: it took 2 paths for 4 samples"),
        (ReadingAhead, [1, 2], "ReadingAhead is not one-to-one: it took more than 2 paths for 2 samples"),
        (Ending, [1, 2, 3, 4], "Ending ended before it gave a sample for each path"),
    ],
)
def test_what_is_not_one_to_one_is_refused_by_name(
    files: VolumeDataset, wrapper: type[Decoding], ids: list[int], message: str
) -> None:
    samples = PathSamples(wrapper(files))
    for _ in range(2):
        with pytest.raises((ConfigError, DataError), match=message):
            list(samples.fetch_many(0, ids))


def test_after_an_error_the_next_samples_are_the_right_ones(files: VolumeDataset) -> None:
    samples = PathSamples(Failing(files))
    source = samples.fetch_many(0, [1, 5, 2])
    assert next(source) == 1
    with pytest.raises(ValueError, match=r"005\.bin is damaged"):
        next(source)
    assert list(samples.fetch_many(0, [2, 3])) == [2, 3]
    given_up = samples.fetch_many(0, [6, 7, 8])
    assert next(given_up) == 6
    given_up.close()
    assert list(samples.fetch_many(0, [9])) == [9]


def test_the_path_of_a_sample_that_failed_goes_with_the_next(tmp_path: Path) -> None:
    fill(tmp_path / "data", COUNT)
    files = VolumeDataset(tmp_path / "data", decode=None, label=None, cache={"root": tmp_path / "c", "limit": 0})
    there = lambda: {int(path.stem) for path in (tmp_path / "c").rglob("*.bin")}  # noqa: E731
    samples = PathSamples(Failing(files))
    samples.retire(0)
    with pytest.raises(ValueError):
        list(samples.fetch_many(0, [1, 5]))
    assert list(samples.fetch_many(0, [2, 3])) == [2, 3]
    assert there() == {1, 2, 3, 5}
    samples.retire(2)  # 1 and 2
    assert there() == {3}
    samples.retire(1)
    assert there() == set()


class Deep(IterableDataset[Any]):
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def __iter__(self) -> Iterator[Any]:
        yield from ()


class Sized(Decoding):
    def __init__(self, files: Any, length: int) -> None:
        super().__init__(files)
        self.length = length

    def __len__(self) -> int:
        return self.length


def test_the_files_inside_a_dataset_are_found(files: VolumeDataset, tmp_path: Path) -> None:
    for holder in (
        Plain(files),
        files.paths(),
        Deep(parts=[1, {"x": files}]),
        Deep(inner=Deep(files=files)),
        Deep(one=files, other=Deep(same=files)),
    ):
        assert find_volume(holder) is files
        assert isinstance(with_index(holder), PathSamples)
    nothing = Deep(a=1, b="text", c=[None])
    assert find_volume(nothing) is None and with_index(nothing) is nothing
    assert with_index(files) is files
    with pytest.raises(ConfigError, match="Deep holds no VolumeDataset"):
        PathSamples(nothing)
    fill(tmp_path / "other", 3)
    other = VolumeDataset(tmp_path / "other", decode=None, label=None)
    with pytest.raises(ConfigError, match="Deep holds 2 VolumeDatasets"):
        find_volume(Deep(one=files, two=other))
    assert len(PathSamples(Sized(files, COUNT))) == COUNT
    with pytest.raises(ConfigError, match="Sized has the length 7, and its VolumeDataset has 23 files"):
        PathSamples(Sized(files, 7))


def test_samples_and_streams_travel_as_pickles(files: VolumeDataset) -> None:
    samples = PathSamples(Plain(files))
    assert samples[3] == 3
    again = pickle.loads(pickle.dumps(samples))
    assert list(again.fetch_many(0, [3, 4])) == [3, 4]
    stream = pickle.loads(pickle.dumps(files.paths(shuffle=False)))
    assert isinstance(stream, PathStream) and isinstance(stream.files.local_paths, LocalPaths)
    assert numbers(stream) == list(range(COUNT))
