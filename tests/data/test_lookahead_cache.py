"""What is fetched goes into the cache where that takes it, is fetched once by all processes, and is given as paths."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lookahead_support import content, fill, listed, name_of, read_all, wait_for
from support.faultfs import FaultFS

from framework.data.cache import LocalCache
from framework.data.files.source import FileSource

COUNT = 20
ALL = {"limit": "100%", "min_free": 0}

Opened = Callable[..., FileSource]


@pytest.fixture
def opened(faultfs: FaultFS, tmp_path: Path) -> Iterator[Opened]:
    """`opened(cache, **options)` is a source of the mount's files, closed at the end."""
    fill(faultfs.backing, COUNT)
    sources: list[FileSource] = []

    def make(limit: int | str | None = "100%", **options: Any) -> FileSource:
        cache = None if limit is None else LocalCache(tmp_path / "cache", limit=limit, min_free=0)
        sources.append(FileSource(faultfs.path, None, listed(faultfs.backing), cache, **options))
        return sources[-1]

    yield make
    faultfs.heal()
    for source in sources:
        source.close()


def opens(faultfs: FaultFS) -> int:
    return len(faultfs.calls("open"))


def test_what_was_fetched_is_not_fetched_again(opened: Opened, faultfs: FaultFS) -> None:
    first, second = opened(), opened()
    first.prefetch(range(10))
    read_all(first, COUNT)
    stats = first.take_stats()
    assert (stats.cache_hits, stats.cache_misses, opens(faultfs)) == (0, COUNT, COUNT)
    threads = threading.active_count()
    for source in (first, second):
        source.prefetch(range(10))
        read_all(source, COUNT)
        stats = source.take_stats()
        assert (stats.cache_hits, stats.cache_misses, stats.bytes_fetched) == (COUNT, 0, 0)
    assert opens(faultfs) == COUNT
    assert threading.active_count() == threads  # none is needed


def test_files_that_changed_are_not_taken_from_the_cache(opened: Opened, faultfs: FaultFS) -> None:
    read_all(opened(), COUNT)
    (faultfs.backing / name_of(3)).write_bytes(content(33))
    changed = opened()  # lists anew
    assert changed.bytes_of(3) == content(33) and changed.bytes_of(4) == content(4)
    assert opens(faultfs) == COUNT + 1


@pytest.mark.parametrize("as_paths", [False, True])
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_cached_file_that_is_damaged_or_gone_is_fetched_again(
    opened: Opened, faultfs: FaultFS, tmp_path: Path, as_paths: bool, is_announced: bool
) -> None:
    source = opened(as_paths=as_paths)
    read_all(source, 3)
    paths = [path for index in range(3) for path in (tmp_path / "cache").rglob(Path(name_of(index)).name)]
    assert len(paths) == 3
    if is_announced:
        source.prefetch(range(3))
    paths[0].unlink()
    os.truncate(paths[1], 10)
    for index in range(3):
        data = Path(source.path_of(index)).read_bytes() if as_paths else source.bytes_of(index)
        assert data == content(index)
    assert opens(faultfs) == 3 + 2 and [path.stat().st_size for path in paths] == [3000] * 3


def test_a_full_cache_keeps_what_it_has_and_the_rest_is_fetched_each_time(opened: Opened, faultfs: FaultFS) -> None:
    source = opened(5 * 3000 + 100)
    for _ in range(3):
        source.prefetch(range(COUNT))
        read_all(source, COUNT)
    stats = source.take_stats()
    assert (stats.cache_hits, stats.cache_misses) == (2 * 5, COUNT + 2 * (COUNT - 5))
    assert opens(faultfs) == stats.cache_misses


def read_in_child(source: FileSource, start: Any, order: list[int]) -> None:
    start.wait(60)
    source.prefetch(order)
    for index in order:
        assert source.bytes_of(index) == content(index)
    source.close()


def test_four_processes_on_a_cold_cache_fetch_each_file_once(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    faultfs.delay(0.02, "open")
    orders = [[(index * step + 1) % COUNT for index in range(COUNT)] for step in (1, 3, 7, 9)]
    children = [context.Process(target=read_in_child, args=(source, start, order)) for order in orders]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0] * 4
    assert Counter(path for _, path in faultfs.calls("open")) == Counter({name_of(i): 1 for i in range(COUNT)})


@pytest.mark.parametrize("limit", [None, 5 * 3000 + 100, "100%"])
def test_paths_stay_until_they_are_retired(opened: Opened, limit: int | str | None) -> None:
    source = opened(limit, as_paths=True)
    source.prefetch(range(8))
    paths = [Path(source.path_of(index)) for index in range(COUNT)]
    for index, path in enumerate(paths):
        assert path.read_bytes() == content(index)
        assert path.suffix == ".bin" and path.parent.name == "class_0"
    source.retire(COUNT - 2)
    kept = {None: 2, "100%": COUNT}.get(limit, 5 + 2)
    assert sum(path.exists() for path in paths) == kept
    assert all(path.exists() for path in paths[-2:])
    source.retire(5)
    assert sum(path.exists() for path in paths) == kept - (0 if limit == "100%" else 2)


def test_a_path_that_is_in_use_twice_stays_until_both_are_retired(opened: Opened) -> None:
    source = opened(None, as_paths=True)
    path = Path(source.path_of(3))
    assert Path(source.path_of(3)) == path
    source.retire(1)
    assert path.read_bytes() == content(3)
    source.retire(1)
    assert not path.exists()


def test_paths_in_transit_go_with_the_source(opened: Opened) -> None:
    source = opened(None, as_paths=True)
    path = Path(source.path_of(3))
    assert path.exists()
    source.close()
    assert not path.exists()


def test_large_files_go_into_the_cache_in_pieces(opened: Opened, faultfs: FaultFS) -> None:
    data = os.urandom((17 << 20) + 3)
    (faultfs.backing / "big").write_bytes(data)
    source = opened(as_paths=True)
    source.prefetch([0])
    assert Path(source.path_of(0)).read_bytes() == data
    assert source.take_stats().bytes_fetched == len(data)
    count = opens(faultfs)
    assert opened().bytes_of(0) == data and opens(faultfs) == count


def test_a_cache_that_cannot_be_written_slows_and_never_stops(opened: Opened, tmp_path: Path) -> None:
    source = opened()
    read_all(source, 5)
    for folder in sorted(path for path in (tmp_path / "cache").rglob("parts") if path.is_dir()):
        folder.rmdir()
        folder.write_bytes(b"no folder")
    read_all(source, COUNT)
    wait_for(lambda: source.take_stats().cache_hits >= 5, "hits")


@pytest.mark.parametrize("size", [3000, (9 << 20) + 3])
def test_a_file_that_the_disk_of_the_cache_refuses_comes_all_the_same(faultfs: FaultFS, size: int) -> None:
    fill(faultfs.backing / "files", 2, size)
    cache = LocalCache(faultfs.path / "cache", limit="100%", min_free=0)
    source = FileSource(faultfs.path / "files", None, listed(faultfs.backing / "files"), cache, as_paths=True)
    assert Path(source.path_of(0)).is_relative_to(faultfs.path / "cache")
    faultfs.fail("write", error=errno.EIO, match="cache/*/parts/*")
    path = Path(source.path_of(1))
    assert path.read_bytes() == content(1, size) and "transit" in path.parts
    faultfs.kill()  # the disk of the cache is gone when the source is closed
    source.close()
