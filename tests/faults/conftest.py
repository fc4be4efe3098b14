"""Fixtures of the tests of broken storage and killed processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "checkpoint"))  # for checkpoint_support

from syscalls import supervised as supervised


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are forced to disk in no time, if there is one: a kill does not ask for the disk."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=place or tmp_path))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
