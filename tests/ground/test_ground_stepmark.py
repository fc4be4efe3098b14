"""The mark of the last step outlives its process, and is never in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.faultfs import FaultFS

from framework.mounts import DISKS, mount_of
from framework.stepmark import StepMark, read_mark


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    if mount_of(tmp_path).split()[0] not in DISKS:
        pytest.skip(f"{tmp_path} is on {mount_of(tmp_path)}")
    return tmp_path


def test_a_mark_says_the_last_step_and_when(on_disk: Path) -> None:
    file = on_disk / "rank0.step"
    mark = StepMark(file)
    assert read_mark(file) is None, "no step was done"
    before = time.time()
    for step in (1, 2, 1 << 40, 7):
        mark.set(step)
    found = read_mark(file)
    assert found is not None and found.step == 7 and before <= found.seen <= time.time()
    mark.close()
    mark.close()
    mark.set(8)  # a straggler after the end
    assert read_mark(file) == found


def test_kill_9_leaves_the_mark(on_disk: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from framework.stepmark import StepMark\n"
        "mark = StepMark(Path(sys.argv[1])); mark.set(41); mark.set(42); os.kill(os.getpid(), signal.SIGKILL)"
    )
    file = on_disk / "rank0.step"
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    found = read_mark(file)
    assert found is not None and found.step == 42


def test_where_there_can_be_no_mark_there_is_none(faultfs: FaultFS, tmp_path: Path) -> None:
    # memory that stands for a file of a mount ends the process if the mount goes away
    for file in (faultfs.path / "rank0.step", tmp_path / "nowhere" / "rank0.step", tmp_path, None):
        mark = StepMark(file)
        mark.set(3)
        mark.close()
        assert file is None or read_mark(file) is None
    assert not (faultfs.path / "rank0.step").exists()


def test_a_file_that_is_no_mark_is_none(tmp_path: Path) -> None:
    file = tmp_path / "rank0.step"
    for data in (b"", b"\0" * 15, b"\0" * 16, b"\xff" * 16, os.urandom(17)):
        file.write_bytes(data)
        assert read_mark(file) is None
