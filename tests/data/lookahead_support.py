"""What the tests of look-ahead share: files with known contents, their list, and waiting for what must come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from framework.data.files.manifest import Manifest, nanoseconds, tag_of
from framework.data.files.source import FileSource
from framework.volume import open_volume

WAIT_SECONDS = 60.0


def content(index: int, size: int = 3_000) -> bytes:
    """What file `index` holds."""
    return np.random.default_rng(index).bytes(size)


def fill(folder: Path, count: int, size: int = 3_000) -> None:
    """Files `class_0/000.bin`, `class_1/001.bin`, … by index."""
    for index in range(count):
        path = folder / name_of(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(index, size))


def name_of(index: int) -> str:
    return f"class_{index // 100}/{index:04d}.bin"


def listed(folder: Path) -> Manifest:
    """The list of the files in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    found = [path.stat() for path in paths]
    names = [os.fsencode(path.relative_to(folder)) for path in paths]
    return Manifest.of(str(folder), names, [one.st_size for one in found], [one.st_mtime_ns for one in found])


def listed_volume(url: str) -> Manifest:
    """The list of the files of a volume."""
    entries = sorted(open_volume(url).list(), key=lambda entry: entry.name)
    stamps = [nanoseconds(entry.modified) for entry in entries]
    tags = [tag_of(entry.tag) for entry in entries]
    return Manifest.of(url, [os.fsencode(one.name) for one in entries], [one.size for one in entries], stamps, tags)


def wait_for(is_so: Callable[[], object], what: str) -> None:
    """Waits until something is so, bounded."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)


def wait_a_moment_for(is_so: Callable[[], object]) -> bool:
    """Gives what must not come 0.3 seconds to come. Returns whether it did."""
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.01)
    return False


def read_all(source: FileSource, count: int, size: int = 3_000) -> None:
    """Asks for all files and compares them."""
    for index in range(count):
        assert source.bytes_of(index) == content(index, size), index
