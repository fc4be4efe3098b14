"""The harness of the crash matrix stops a process where it is told, whoever makes the call."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from syscalls import supervise

pytestmark = pytest.mark.usefixtures("supervised")


def steps(folder: Path) -> None:
    """Seven calls that change files, one of them in a thread, and some that change nothing."""
    os.mkdir(folder / "a")

    def write() -> None:
        with open(folder / "a" / "one", "wb", buffering=0) as stream:
            stream.write(b"1")
            os.fsync(stream.fileno())

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    sys.stderr.flush()
    os.listdir(folder)
    (folder / "a" / "one").read_bytes()
    os.replace(folder / "a" / "one", folder / "a" / "two")
    os.unlink(folder / "a" / "two")
    os.rmdir(folder / "a")


def test_a_process_dies_before_the_call_that_it_is_stopped_at(tmp_path: Path) -> None:
    left = []
    for number in range(1, 9):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = supervise(lambda folder=folder: steps(folder), folder, stop_at=number)
        assert outcome.code == (-signal.SIGKILL if number < 8 else 0)
        left.append({path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()})
        assert (folder / "a").exists() == (1 < number < 8)
    assert left == [{}, {}, {"one": 0}, {"one": 1}, {"one": 1}, {"two": 1}, {}, {}]
    assert [(name, Path(path).name) for name, path in outcome.calls] == [
        ("mkdir", "a"), ("open", "one"), ("write", "one"), ("fsync", "one"), ("rename", "two"), ("unlink", "two"),
        ("rmdir", "a"),
    ]  # fmt: skip


def test_a_call_can_be_made_to_fail_instead(tmp_path: Path) -> None:
    outcome = supervise(lambda: steps(tmp_path), tmp_path, stop_at=4, error=errno.EIO)
    assert outcome.code == 0  # an error of a thread
    assert not (tmp_path / "a").exists()
    outcome = supervise(lambda: steps(tmp_path), tmp_path, stop_at=1, error=errno.ENOSPC)
    assert outcome.code == 1 and not (tmp_path / "a").exists() and len(outcome.calls) == 1
