"""The bytes and local paths of a dataset's files, in this process.

Guarantee: what is given out has the size that the list has, and was not written since. Each process has its own
threads and connections: what a parent had is never used in a forked child. Copies in another process start empty.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.data.files.manifest import Manifest
from framework.data.files.reading import Reader, Watch
from framework.data.stats import DataStats

DEADLINE_SECONDS = 300.0


class FileSource:
    """Gives files by index. Picklable.

    Args:
        place: The path or URL of the volume.
        options: Settings of an object store.
        manifest: Its files.
        cache: Where files are kept; none: nowhere.
        as_paths: Whether files are asked for as paths or as bytes.
        budget_bytes: Bytes that this rank may hold ahead, over all its workers.
        threads: How many requests this process may have under way; default from the number of processes here.
        deadline_seconds: How long a request is tried again, and how long one may have no answer.
    """

    def __init__(
        self,
        place: str | Path,
        options: Mapping[str, str] | None,
        manifest: Manifest,
        cache: Any = None,
        *,
        as_paths: bool = False,
        budget_bytes: int = 256 << 20,
        threads: int | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.place = place
        self.options = dict(options or {})
        self.manifest = manifest
        self.cache = cache
        self.as_paths = as_paths
        self.budget_bytes = budget_bytes
        self.threads = threads
        self.deadline_seconds = deadline_seconds
        self._reader: Reader | None = None
        self._pid = 0
        self._stats = DataStats()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def prefetch(self, indices: Sequence[int]) -> None:
        """These files will be asked for later, in this order. Never raises."""

    def bytes_of(self, index: int) -> bytes:
        """The content of a file.

        Raises:
            DataError: It could not be read, or is not as it was listed; the message names it.
        """
        watch = Watch()
        data = self._mine().whole(index, watch)
        self._stats.cache_misses += 1
        self._stats.bytes_fetched += len(data)
        self._stats.retries += watch.retries
        self._stats.add_read(watch.seconds or 0.0)
        return data

    def path_of(self, index: int) -> str:
        """A local path of a file, which stays until `retire` has counted it.

        Raises:
            DataError: It could not be read, or is not as it was listed; the message names it.
        """
        data = self.bytes_of(index)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="transit-")
        path = os.path.join(self._folder.name, f"{index}")
        Path(path).write_bytes(data)
        return path

    def retire(self, count: int) -> None:
        """The first `count` files given out and not yet retired are no longer in use."""

    def take_stats(self) -> DataStats:
        """What was counted in this process since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Ends threads and gives back what is held; using it again starts anew. Idempotent."""
        self._reader = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None, "_pid": 0, "_stats": DataStats(), "_folder": None}

    def _mine(self) -> Reader:
        if self._reader is None or self._pid != os.getpid():
            self._reader = Reader(self.place, self.manifest, self.options, self.deadline_seconds)
            self._pid = os.getpid()
        return self._reader
