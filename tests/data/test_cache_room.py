"""The cache stays within its bounds; a disk that is full, read-only or broken slows a job and never stops it."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_support import ALL, another, assert_counted, counted, keep, kept_bytes, make_idle, read
from support.faultfs import FaultFS

from framework.data.cache import CacheSpace, LocalCache, housekeeping, local
from framework.data.cache.amounts import Amount
from framework.errors import ConfigError

SIZE = 1000


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB and few files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = "size=1m,nr_inodes=40"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def epoch(space: CacheSpace, files: int, seed: int) -> int:
    """Reads all files in a random order, through the cache. Returns how many it had."""
    hits = 0
    for number in random.Random(seed).sample(range(files), files):
        if read(space, str(number), SIZE):
            hits += 1
        else:
            keep(space, str(number), SIZE)
    return hits


def test_with_room_for_half_of_the_files_half_of_the_reads_hit(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache", limit=50 * SIZE, min_free=0)
    space = cache.open("d1")
    assert [epoch(space, 100, seed) for seed in range(4)] == [0, 50, 50, 50]
    assert counted(cache) == 50 * SIZE
    assert_counted(cache)


def test_a_cache_that_is_full_says_so_once_with_its_bounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    space = LocalCache(tmp_path / "cache", limit="5kB", min_free=0).open("d1")
    epoch(space, 10, 1)
    epoch(space, 10, 2)
    assert len(warnings(caplog)) == 1
    assert "is full: it holds 5.0 kB (cache.limit: 5.0 kB)" in warnings(caplog)[0]


def test_a_file_that_is_too_large_does_not_keep_smaller_ones_out(tmp_path: Path) -> None:
    space = LocalCache(tmp_path / "cache", limit=5 * SIZE, min_free=0).open("d1")
    assert space.admit("large", 6 * SIZE) is None
    assert keep(space, "small", SIZE)


def test_no_limit_lets_nothing_in_and_reads_what_is_there(tmp_path: Path) -> None:
    assert keep(LocalCache(tmp_path / "cache", **ALL).open("d1"), "a", 10)
    space = LocalCache(tmp_path / "cache", limit=0, min_free=0).open("d1")
    assert keep(space, "b", 10) is None and read(space, "a", 10)


def test_the_floor_keeps_the_disk_free_for_others(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "RETRY_SECONDS", 0.0)
    space = LocalCache(disk / "cache", limit="100%", min_free="45%").open("d1")
    size = 100_000
    kept = [number for number in range(10) if keep(space, str(number), size)]
    assert len(kept) == 5  # of 1 MiB half
    (disk / "other").write_bytes(bytes(300_000))
    assert keep(space, "more", size) is None and all(read(space, str(number), size) for number in kept)
    (disk / "other").unlink()
    assert keep(space, "small", 10_000)


def test_a_part_of_the_disk_is_a_limit_too(disk: Path) -> None:
    space = LocalCache(disk / "cache", limit="25%", min_free=0).open("d1")
    assert sum(keep(space, str(number), 100_000) is not None for number in range(10)) == 2


@pytest.mark.parametrize("kind", ["bytes", "files"])
def test_a_disk_that_is_full_slows_and_never_stops(
    disk: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LocalCache(disk / "cache", **ALL)
    space = cache.open("d1")
    if kind == "bytes":  # without anybody looking: the room goes between admission and writing
        admissions = [space.admit(str(number), 100_000) for number in range(3)]
        (disk / "other").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096 - 150_000))
        paths = [one.write([bytes(100_000)]) for one in admissions if one is not None]
        assert [path is not None for path in paths] == [True, False, False]
    else:
        paths = [keep(space, str(number), 100) for number in range(100)]
        assert 10 < sum(path is not None for path in paths) < 40
    assert len(warnings(caplog)) == 1 and "No space left on device" in warnings(caplog)[0]
    assert keep(space, "more", 100_000) is None
    assert_counted(cache)
    for name in ("other", "cache/data/d1/files/0"):
        (disk / name).unlink(missing_ok=True)
    monkeypatch.setattr(local, "PAUSE_SECONDS", 0.0)
    cache.refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))  # as if the pause was over
    assert keep(space, "more", 1000) and read(space, "more", 1000)


@pytest.mark.parametrize("error", [errno.EDQUOT, errno.EIO, errno.ENOTCONN])
def test_whatever_the_disk_refuses_the_job_goes_on(
    faultfs: FaultFS, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    space = LocalCache(faultfs.path / "cache", **ALL).open("d1")
    assert keep(space, "a", SIZE)
    faultfs.fail("write", "create", "statfs", "rename", error=error)
    assert [keep(space, str(number), SIZE) for number in range(5)] == [None] * 5
    assert read(space, "a", SIZE)
    assert len(warnings(caplog)) == 1 and os.strerror(error) in warnings(caplog)[0]
    faultfs.vanish()
    assert not read(space, "a", SIZE)
    faultfs.heal()
    assert read(space, "a", SIZE)


def test_a_write_that_the_disk_takes_in_pieces_is_whole(faultfs: FaultFS) -> None:
    space = LocalCache(faultfs.path / "cache", **ALL).open("d1")
    faultfs.short(700)
    assert keep(space, "a", 10_000) and read(space, "a", 10_000)


def test_a_cache_on_a_read_only_disk_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    real, bound = tmp_path / "real", tmp_path / "bound"
    bound.mkdir()
    space = LocalCache(real, **ALL).open("d1")
    assert keep(space, "a", SIZE)
    space.close()
    if subprocess.run(["mount", "--bind", str(real), str(bound)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(bound)], check=True)
        cache = LocalCache(bound, **ALL)
        space = cache.open("d1")
        assert read(space, "a", SIZE) and keep(space, "b", SIZE) is None
        assert not read(cache.open("d2"), "a", SIZE) and keep(cache.open("d2"), "b", SIZE) is None
        with space.lock("b") as is_locked:
            assert not is_locked
        assert len(warnings(caplog)) == 1 and "Read-only file system" in warnings(caplog)[0]
        assert LocalCache(real, **ALL).housekeeping.clear(real / "data" / "d1") is None  # it is in use
    finally:
        space.close()
        subprocess.run(["umount", "-l", str(bound)], check=True)


def test_a_cache_whose_folder_goes_is_not_made_anew_by_those_who_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk may be mounted no more, and another one lies below."""
    monkeypatch.setattr(local, "PAUSE_SECONDS", 0.0)
    cache = LocalCache(tmp_path / "cache", **ALL)
    space = cache.open("d1")
    assert keep(space, "a", SIZE)
    shutil.rmtree(cache.root)
    copy = pickle.loads(pickle.dumps(space))
    for one in (space, copy, space):
        assert not read(one, "a", SIZE) and keep(one, "a", SIZE) is None
    assert not cache.root.exists() and len(warnings(caplog)) >= 1
    assert keep(cache.open("d1"), "a", SIZE)


def test_datasets_that_nobody_uses_make_room_the_oldest_first(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache", limit=5 * SIZE, min_free=0)
    for days, name in enumerate(("new", "old", "older"), start=1):
        space = cache.open(name)
        assert keep(space, "a", SIZE)
        space.close()
        make_idle(space, days * 86400)
    space = cache.open("mine")
    assert [bool(keep(space, str(number), SIZE)) for number in range(4)] == [True] * 4
    assert sorted(os.listdir(cache.layout.data)) == ["mine", "new"]
    assert_counted(cache)
    assert [bool(keep(space, str(number), SIZE)) for number in (4, 5)] == [True, False]
    assert os.listdir(cache.layout.data) == ["mine"] and not os.listdir(cache.layout.trash)
    assert_counted(cache)


def test_a_file_that_never_fits_costs_other_datasets_nothing(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache", limit=5 * SIZE, min_free=0)
    other = cache.open("other")
    assert keep(other, "a", SIZE)
    other.close()
    make_idle(other, 86400)
    assert keep(cache.open("mine"), "large", 6 * SIZE) is None
    assert read(other, "a", SIZE)


def test_deleting_takes_no_longer_than_a_moment_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SLICE_SECONDS", 0.0)
    cache = LocalCache(tmp_path / "cache", limit=100 * SIZE, min_free=0)
    other = cache.open("other")
    for number in range(100):
        assert keep(other, str(number), SIZE)
    other.close()
    make_idle(other, 86400)
    space = cache.open("mine")
    kept = [keep(space, str(number), 60 * SIZE) for number in range(3)]
    assert [path is not None for path in kept] == [False, True, False]  # 32 files went in each of two moments
    assert 0 < kept_bytes(cache) <= 100 * SIZE
    cache.housekeeping.make_room(lambda: False, 60.0)
    assert counted(cache) == 60 * SIZE and not os.listdir(cache.layout.trash)


def test_a_counter_that_is_damaged_or_old_is_made_anew(tmp_path: Path) -> None:
    for damage in (b"", b"x" * 24, b"usage/1\n" + bytes([255] * 16)):
        cache = LocalCache(tmp_path / "cache", limit=5 * SIZE, min_free=0)
        space = cache.open("d1")
        keep(space, "a", SIZE)
        cache.layout.usage.write_bytes(damage)
        assert keep(space, "b", SIZE)
        cache.layout.usage.write_bytes(damage)
        assert counted_after_opening(cache) == 2 * SIZE


def counted_after_opening(cache: LocalCache) -> int:
    cache.open("d1")
    return counted(cache)


def test_what_others_deleted_is_noticed_when_the_cache_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LocalCache(tmp_path / "cache", limit=5 * SIZE, min_free=0)
    space = cache.open("d1")
    assert all(keep(space, str(number), SIZE) for number in range(5))
    shutil.rmtree(space.folder / "files")
    assert keep(space, "new", SIZE) is None  # it was counted a moment ago
    monkeypatch.setattr(housekeeping, "RECOUNT_SECONDS", 0.0)
    monkeypatch.setattr(cache, "_refused_until", 0.0)
    assert keep(space, "new", SIZE)
    assert_counted(cache)


def test_what_a_killed_process_was_writing_is_swept_and_not_counted(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache", **ALL)
    space = cache.open("d1")
    with another(lambda: space.admit("a", SIZE)):
        assert counted(cache) == SIZE
        assert not read(cache.open("d1"), "a", SIZE)
        assert counted(cache) == SIZE and len(os.listdir(space.folder / "parts")) == 1  # it lives
    assert not read(cache.open("d1"), "a", SIZE)
    assert counted(cache) == 0 and not os.listdir(space.folder / "parts")


def test_what_another_machine_left_is_swept_after_an_hour(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache", **ALL)
    space = cache.open("d1")
    space.lease()
    part = space.folder / "parts" / f"{'0' * 12}.1.1.0.77"
    part.write_bytes(b"x")
    cache.open("d1").lease()
    assert part.exists()
    os.utime(part, (1, 1))
    cache.open("d1").lease()
    assert not part.exists()


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        (123, 1000, 123), (1e3, 1, 1000), ("123", 1, 123), ("5 kB", 1, 5000), ("1.5GB", 1, 1_500_000_000), ("2TiB", 1, 2 << 40),
        ("64mib", 1, 64 << 20), ("3g", 1, 3 * 10**9), ("0", 1, 0), ("80%", 1000, 800), ("12.5 %", 1000, 125), ("100%", 7, 7),
    ],
)  # fmt: skip
def test_amounts_are_bytes_units_or_parts_of_the_disk(text: int | str, total: int, expected: int) -> None:
    assert Amount.parse(text, key="cache.limit").of(total) == expected


@pytest.mark.parametrize(
    "text", ["", "%", "101%", "-5", "5 parsecs", "1e3GB", -1, True, None, float("nan"), float("inf"), []]
)
def test_what_is_no_amount_is_refused_by_key(text: object) -> None:
    with pytest.raises(ConfigError, match=r"cache\.min_free=.*200GB"):
        LocalCache("nowhere", min_free=text)  # type: ignore[arg-type]
    assert not Path("nowhere").exists()
