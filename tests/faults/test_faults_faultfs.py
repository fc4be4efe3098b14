"""The file system of the tests does what it is told, and what a file system does."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from support.faultfs import FaultFS


def test_it_passes_everything_on(faultfs: FaultFS) -> None:
    folder = faultfs.path / "a" / "b"
    folder.mkdir(parents=True)
    data = os.urandom(3 << 20)
    (folder / "file").write_bytes(data)
    assert (folder / "file").read_bytes() == data == (faultfs.backing / "a/b/file").read_bytes()
    os.rename(folder / "file", folder / "renamed")
    os.link(folder / "renamed", folder / "linked")
    (folder / "pointer").symlink_to("renamed")
    assert sorted(os.listdir(folder)) == ["linked", "pointer", "renamed"]
    assert (folder / "pointer").read_bytes() == data
    with (folder / "linked").open("ab") as stream:
        stream.write(b"more")
        os.fsync(stream.fileno())
    assert (folder / "renamed").stat().st_size == len(data) + 4
    os.truncate(folder / "renamed", 7)
    assert (folder / "linked").read_bytes() == data[:7]
    with pytest.raises(FileExistsError):
        os.open(folder / "linked", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    with FileLock(folder / "lock"):
        pass
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert os.listdir(faultfs.path / "a") == []
    assert ("fsync", "a/b/linked") in faultfs.calls("fsync")


def test_errors_come_for_the_paths_and_as_often_as_told(faultfs: FaultFS) -> None:
    faultfs.fail("write", match="*one*", after=1, count=2)
    outcomes = []
    for name in ("two", "one", "one", "one", "one"):
        try:
            (faultfs.path / name).write_bytes(b"x")
            outcomes.append(0)
        except OSError as error:
            outcomes.append(error.errno)
    assert outcomes == [0, 0, errno.EIO, errno.EIO, 0]
    for operation, call in (("read", Path.read_bytes), ("fsync", sync)):
        faultfs.fail(operation)
        with pytest.raises(OSError, match="Input/output error"):
            call(faultfs.path / "two")
        faultfs.heal()
        call(faultfs.path / "two")


def sync(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def test_a_full_volume_takes_what_fits_and_has_room_after_a_deletion(faultfs: FaultFS) -> None:
    (faultfs.path / "old").write_bytes(bytes(5000))
    faultfs.full(after=3000)
    fd = os.open(faultfs.path / "new", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(fd, 0, 4000)
    assert os.write(fd, bytes(4000)) == 3000
    with pytest.raises(OSError, match="No space left"):
        os.write(fd, b"x")
    (faultfs.path / "old").unlink()
    assert os.write(fd, bytes(4000)) == 4000
    os.close(fd)


def test_writes_are_short_and_slow_as_told(faultfs: FaultFS) -> None:
    faultfs.short(1000, match="f", count=1)
    fd = os.open(faultfs.path / "f", os.O_CREAT | os.O_WRONLY)
    assert os.write(fd, bytes(5000)) == 1000
    assert os.write(fd, bytes(5000)) == 5000
    faultfs.delay(0.2, "write")
    began = time.monotonic()
    os.write(fd, b"x")
    assert time.monotonic() - began >= 0.2
    faultfs.heal()
    faultfs.limit(1_000_000)
    began = time.monotonic()
    os.write(fd, bytes(200_000))
    assert time.monotonic() - began >= 0.2
    os.close(fd)


def test_neither_rename_nor_link(faultfs: FaultFS) -> None:
    (faultfs.path / "a").write_bytes(b"x")
    faultfs.no_rename()
    for call in (os.rename, os.replace, os.link):
        with pytest.raises(OSError) as caught:
            call(faultfs.path / "a", faultfs.path / "b")
        assert caught.value.errno in (errno.ENOSYS, errno.EPERM)  # newer kernels make EPERM of it for links


def test_it_vanishes_dies_and_comes_back(faultfs: FaultFS) -> None:
    (faultfs.path / "a").write_bytes(b"x")
    faultfs.vanish()
    with pytest.raises(OSError) as caught:
        (faultfs.path / "a").read_bytes()
    assert caught.value.errno == errno.ENOTCONN
    faultfs.heal()
    assert (faultfs.path / "a").read_bytes() == b"x"
    faultfs.kill()
    with pytest.raises(OSError) as caught:
        os.listdir(faultfs.path)
    assert caught.value.errno == errno.ENOTCONN
    faultfs.unmount()
    assert os.listdir(faultfs.path) == []
    faultfs.mount()
    assert (faultfs.path / "a").read_bytes() == b"x"


def test_reads_end_early_and_calls_hang_as_told(faultfs: FaultFS) -> None:
    (faultfs.path / "a").write_bytes(b"0123456789")
    faultfs.cut(4, count=2)
    assert ((faultfs.path / "a").read_bytes(), (faultfs.path / "a").stat().st_size) == (b"0123", 10)
    faultfs.heal()
    faultfs.stall("read", match="a")
    contents: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: contents.append((faultfs.path / "a").read_bytes()), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    (faultfs.path / "b").write_bytes(b"x")  # others are served
    assert all(thread.is_alive() for thread in threads)
    faultfs.heal()
    for thread in threads:
        thread.join(60)
    assert contents == [b"0123456789"] * 2
