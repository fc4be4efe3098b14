"""What is in the cache is whole and of the version that was asked for, under the name that it had."""

from __future__ import annotations

import os
import pickle
import random
import threading
from pathlib import Path

import pytest
from cache_support import ALL, assert_counted, content, counted, ended, fork, keep, read

from framework.data.cache import CacheSpace, LocalCache
from framework.errors import DataError


@pytest.fixture
def cache(tmp_path: Path) -> LocalCache:
    return LocalCache(tmp_path / "cache", **ALL)


@pytest.fixture
def space(cache: LocalCache) -> CacheSpace:
    return cache.open("d1")


def test_a_file_that_was_written_is_found_under_its_own_name(cache: LocalCache, space: CacheSpace) -> None:
    assert space.path("train/n01/x.JPEG", 5) is None
    path = keep(space, "train/n01/x.JPEG", 5)
    assert path is not None and path == space.path("train/n01/x.JPEG", 5)
    assert str(path).endswith("/train/n01/x.JPEG") and path.read_bytes() == content("train/n01/x.JPEG", 5)
    assert_counted(cache)


def test_a_restart_finds_what_was_cached_before(cache: LocalCache, space: CacheSpace, tmp_path: Path) -> None:
    assert keep(space, "a", 1000)
    space.close()
    assert read(LocalCache(tmp_path / "cache", limit=10, min_free="100%").open("d1"), "a", 1000)


@pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
def test_a_file_of_another_size_is_not_given_out_and_replaced(
    cache: LocalCache, space: CacheSpace, change: str
) -> None:
    path = keep(space, "a", 1000)
    assert path is not None
    found = os.stat(path)
    os.truncate(path, {"shorter": 999, "longer": 1001, "empty": 0}[change])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert not read(space, "a", 1000)
    assert keep(space, "a", 1000) == path and read(space, "a", 1000)


def test_another_version_of_a_file_takes_the_place_of_the_one_before(cache: LocalCache, space: CacheSpace) -> None:
    assert keep(space, "a", 1000, 1)
    assert not read(space, "a", 1000, 2) and not read(space, "a", 1000, "")
    assert keep(space, "a", 1000, 2)
    assert read(space, "a", 1000, 2) and not read(space, "a", 1000, 1)
    assert keep(space, "a", 500, "etag")
    assert read(space, "a", 500, "etag")
    assert counted(cache) == 500
    assert_counted(cache)


def test_datasets_do_not_see_each_others_files(cache: LocalCache, space: CacheSpace) -> None:
    assert keep(space, "a", 10)
    for fingerprint in ("d2", "../d1", "d1/", "s3://bucket/d1", ".", "d" * 1000):
        assert not read(cache.open(fingerprint), "a", 10)
    assert sorted(os.listdir(cache.root)) == sorted(["cache.json", "chores", "data", "usage"])


ODD = [
    "spaces and 'quotes'", "new\nline", "caf\u00e9", "cafe\u0301", "\u5199\u771f/\U0001f600.jpg", "bad\udcff.jpg", "no\ud800name",
    "x" * 255, "y" * 300, "/".join(["deep"] * 700), "../up", "a/../../b", "/absolute", "a//b", "folder/", "./a", "nul\0", "", ".",
    "..", "CASE", "case", ".hidden", "-dash", "%41", "a\\b",
]  # fmt: skip


def test_files_of_odd_names_are_kept_apart_and_inside_the_cache(
    cache: LocalCache, space: CacheSpace, tmp_path: Path
) -> None:
    space.lease()
    outside = {path for path in tmp_path.rglob("*") if space.folder not in path.parents}
    for number, key in enumerate(ODD):
        assert keep(space, key, 100 + number) is not None, key
    for number, key in enumerate(ODD):
        assert read(space, key, 100 + number), key
        path = space.path(key, 100 + number)
        assert path is not None and os.path.realpath(path).startswith(f"{space.folder}/")
    assert {path for path in tmp_path.rglob("*") if space.folder not in path.parents} == outside
    assert_counted(cache)


@pytest.mark.parametrize("keys", [("a", "a/b", "a/b/c"), ("a/b/c", "a/b", "a")])
def test_a_name_can_be_a_file_and_the_beginning_of_others(
    cache: LocalCache, space: CacheSpace, keys: tuple[str, ...]
) -> None:
    for stamp in (1, 2):  # object stores allow it
        for key in keys:
            assert keep(space, key, 50, stamp) is not None
        assert all(read(space, key, 50, stamp) for key in keys)
    assert_counted(cache)


@pytest.mark.parametrize("got", [0, 99, 101, 5000])
def test_a_download_of_another_size_is_told_and_not_kept(cache: LocalCache, space: CacheSpace, got: int) -> None:
    admission = space.admit("dir/a.jpg", 100)
    assert admission is not None
    with pytest.raises(DataError, match=r"dir/a.jpg has 100 bytes by its listing, and .* came"):
        admission.write([bytes(got)])
    assert space.path("dir/a.jpg", 100) is None and counted(cache) == 0
    assert not list((space.folder / "parts").iterdir())


def test_an_error_of_the_source_is_passed_on_and_nothing_is_kept(cache: LocalCache, space: CacheSpace) -> None:
    def failing() -> object:
        yield b"12345"
        raise OSError(5, "of the source")

    admission = space.admit("a", 10)
    assert admission is not None
    with pytest.raises(OSError, match="of the source"):
        admission.write(failing())  # type: ignore[arg-type]
    assert space.path("a", 10) is None and counted(cache) == 0
    assert keep(space, "a", 10)  # the cache is none the worse


def test_what_is_not_written_after_all_gives_its_bytes_back(cache: LocalCache, space: CacheSpace) -> None:
    admission = space.admit("a", 1000)
    assert admission is not None and counted(cache) == 1000
    admission.cancel()
    admission.cancel()
    assert counted(cache) == 0 and not list((space.folder / "parts").iterdir())


def test_an_empty_file_can_be_kept(space: CacheSpace) -> None:
    assert keep(space, "empty", 0) and read(space, "empty", 0)


def test_files_have_the_mode_of_the_umask_and_the_folder_is_closed_to_others(space: CacheSpace) -> None:
    before = os.umask(0o027)
    try:
        path = keep(space, "a", 10)
    finally:
        os.umask(before)
    assert path is not None and path.stat().st_mode & 0o777 == 0o640
    assert space.cache.root.stat().st_mode & 0o777 == 0o700


def test_an_open_file_stays_as_it_was_while_it_is_replaced(space: CacheSpace) -> None:
    path = keep(space, "a", 5000, 1)
    assert path is not None
    with path.open("rb") as stream:
        assert keep(space, "a", 5000, 2)
        assert stream.read() == content("a", 5000, 1)


def test_it_can_be_sent_to_another_process(space: CacheSpace) -> None:
    assert keep(space, "a", 10)
    copy = pickle.loads(pickle.dumps(space))
    assert read(copy, "a", 10) and keep(copy, "b", 10) and read(space, "b", 10)


def test_many_threads_may_use_one_space(cache: LocalCache, space: CacheSpace) -> None:
    keys = [f"{number % 7}/{number}" for number in range(60)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for key in random.Random(seed).sample(keys, len(keys)):
                with space.lock(key):
                    assert read(space, key, 100) or keep(space, key, 100)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and all(read(space, key, 100) for key in keys)
    assert counted(cache) == 6000
    assert_counted(cache)


def test_a_forked_child_uses_what_its_parent_opened(cache: LocalCache, space: CacheSpace) -> None:
    assert keep(space, "a", 10)
    admission = space.admit("b", 10)
    assert admission is not None

    def child() -> None:
        assert read(space, "a", 10) and keep(space, "c", 10)
        admission.cancel()  # its parent's: stays
        space.close()

    assert ended(fork(child)) == 0
    assert read(space, "c", 10)
    assert admission.write([content("b", 10)]) and read(space, "b", 10)
    assert_counted(cache)
