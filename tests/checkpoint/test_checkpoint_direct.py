"""Files written past the page cache hold the same bytes, and what does not allow it is written through the cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faultfs import FaultFS

from framework import mounts
from framework.checkpoint import direct, files
from framework.checkpoint.direct import BLOCK, LEAST_BYTES
from framework.errors import CheckpointError
from framework.mounts import DISKS, mount_of

Write = Callable[[int, Any], int]


def in_memory(size: int, *, shift: int = 0) -> memoryview:
    """Bytes in memory that begins at a page, or `shift` bytes after one."""
    memory = mmap.mmap(-1, size + shift)
    view = memoryview(memory)[shift:]
    view[:] = os.urandom(size)
    return view


class Writes:
    """Every `os.write`: its length, and whether it went past the page cache.

    Args:
        answer: Instead of the system's, if it gives one: called with the number of the write, and whether it is direct.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, bool], int | None] | None = None
    ) -> None:
        self.seen: list[tuple[int, bool]] = []
        self._answer = answer
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: Any) -> int:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.seen.append((len(data), is_direct))
        count = None if self._answer is None else self._answer(len(self.seen), is_direct)
        return self._write(fd, data if count is None else data[:count])

    @property
    def direct_bytes(self) -> int:
        return sum(length for length, is_direct in self.seen if is_direct)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    if mount_of(tmp_path).split()[0] not in DISKS:
        pytest.skip(f"{tmp_path} is on {mount_of(tmp_path)}")
    return tmp_path


def check(path: Path, data: memoryview) -> None:
    record = files.create(path, data)
    assert path.read_bytes() == data
    assert (record.size, record.crc32) == (len(data), files.sums_of(data))
    assert record.crc32[0] == zlib.crc32(data[: files.PIECE_BYTES])


@pytest.mark.parametrize("tail", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("size", [LEAST_BYTES, files.PIECE_BYTES + files.WRITE_BYTES])
def test_whole_blocks_go_past_the_cache(on_disk: Path, size: int, tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, writes = in_memory(size + tail), Writes(monkeypatch)
    check(on_disk / "file", data)
    assert writes.direct_bytes == len(data) // BLOCK * BLOCK


@pytest.mark.parametrize("data", [in_memory(LEAST_BYTES, shift=512), memoryview(bytes(LEAST_BYTES)), in_memory(BLOCK)])
def test_what_lies_elsewhere_or_is_small_goes_through_the_cache(
    tmp_path: Path, data: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    check(tmp_path / "file", data)
    assert writes.direct_bytes == 0


def test_a_mount_that_is_no_disk_is_written_through_the_cache(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    check(faultfs.path / "file", in_memory(LEAST_BYTES + 7))
    assert writes.direct_bytes == 0


def test_a_file_system_without_direct_writes_is_written_through_the_cache(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "DISKS", frozenset(("proc", *DISKS, mount_of(faultfs.path).split()[0])))
    check(faultfs.path / "file", in_memory(LEAST_BYTES + 7))


@pytest.mark.parametrize("count", [1, BLOCK, BLOCK + 512, LEAST_BYTES - 1])
def test_a_write_that_takes_only_a_part_is_gone_on_with(
    on_disk: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(number: int, is_direct: bool) -> int | None:
        if number != 2:
            return None
        if count % BLOCK:  # as a disk may: the place in the file is then no multiple of a block
            flags = fcntl.fcntl(opened[0], fcntl.F_GETFL)
            fcntl.fcntl(opened[0], fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return count

    opened: list[int] = []
    make = direct.DirectFile.__init__

    def remember(self: direct.DirectFile, fd: int, data: memoryview) -> None:
        opened.append(fd)
        make(self, fd, data)

    monkeypatch.setattr(direct.DirectFile, "__init__", remember)
    Writes(monkeypatch, answer)
    check(on_disk / "file", in_memory(3 * LEAST_BYTES))


def test_a_disk_that_asks_for_longer_blocks_is_written_through_the_cache(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(number: int, is_direct: bool) -> int | None:
        if is_direct and number > 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return None

    writes = Writes(monkeypatch, answer)
    check(on_disk / "file", in_memory(3 * LEAST_BYTES))
    assert [is_direct for _, is_direct in writes.seen] == [True, True, False, False]


def test_an_error_of_the_disk_is_one(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(number: int, is_direct: bool) -> int | None:
        if number > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    Writes(monkeypatch, answer)
    with pytest.raises(CheckpointError, match=r"file could not be written: Input/output error"):
        files.create(on_disk / "file", in_memory(3 * LEAST_BYTES))
    assert not (on_disk / "file").exists()
