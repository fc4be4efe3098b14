"""Where the bytes of a shard come from, in this process.

Guarantee: a shard on a disk of this machine is read where it is. One of a volume is fetched whole, ahead where it is
announced, into the cache or, if it is small, beside it; one that is too large for that is read by ranged requests and
never held. Whichever way, it has the size it was listed with. Nothing of this is taken into a forked process.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils.data

from framework.data.cache.local import LocalCache
from framework.data.cache.space import CacheSpace
from framework.data.files.manifest import Manifest
from framework.data.files.reading import PIECE, Reader, Watch
from framework.data.files.source import BUDGET_BYTES, DEADLINE_SECONDS, FileSource, is_on_disk
from framework.data.shards.base import Bytes
from framework.data.stats import DataStats
from framework.errors import DataError

LOCAL_CHUNK = 128 << 10
REMOTE_CHUNK = 1 << 20  # takes about as long as the latency of one more request


class ShardFiles:
    """Opens shards by number. Picklable; a copy in another process, a forked one too, starts empty.

    Args:
        place: The path or URL of the volume.
        options: Settings of an object store.
        manifest: The shards.
        cache: Where they are kept; none: nowhere.
        budget_bytes: Size up to which a shard that is not cached is fetched whole, shared by the workers.
        deadline_seconds: How long a request is tried again.
    """

    def __init__(
        self, place: str, options: Mapping[str, str], manifest: Manifest, cache: LocalCache | None, *,
        budget_bytes: int = BUDGET_BYTES, deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:  # fmt: skip
        self.manifest = manifest
        self.cache = cache
        self._budget_bytes = budget_bytes
        self._source = FileSource(
            place, options, manifest, cache, as_paths=True, budget_bytes=budget_bytes, deadline_seconds=deadline_seconds
        )
        self._mine: _Mine | None = None

    def prefetch(self, index: int) -> None:
        """This shard will be opened after the present one. Cheap; never raises."""
        if self._process().fits(index):
            self._source.prefetch([index])

    def open(self, index: int) -> Bytes:
        """A shard, for one reader.

        Raises:
            DataError: It cannot be read, or is not as it was listed.
        """
        mine = self._process()
        if not mine.fits(index):
            return self.open_ranged(index)
        path = self._source.path_of(index)
        try:
            return _local(path, self.manifest.size(index), self.shown(index))
        finally:
            self._source.retire(1)  # an open file stays, whatever becomes of its name

    def open_ranged(self, index: int) -> Bytes:
        """A shard of which few bytes are wanted, or that is too large to be fetched whole; raises as `open` does."""
        mine, size = self._process(), self.manifest.size(index)
        path = mine.path(index)
        if path is not None:
            return _local(path, size, self.shown(index))
        return Bytes(size, functools.partial(mine.fetch, index), REMOTE_CHUNK)

    def shown(self, index: int) -> str:
        """The path or URL of a shard, for messages."""
        return self._process().reader.shown(index)

    def take_stats(self) -> DataStats:
        """What was counted in this process since the last call."""
        stats = self._source.take_stats()
        stats.add(self._process().stats.take())
        return stats

    def close(self) -> None:
        """Ends threads and gives the cache back; using it again starts anew. Idempotent."""
        self._source.close()
        mine, self._mine = self._mine, None
        if mine is not None and mine.pid == os.getpid() and mine.space is not None:
            mine.space.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mine": None}

    def _process(self) -> _Mine:
        if self._mine is None or self._mine.pid != os.getpid():
            self._mine = _Mine(self._source, self._budget_bytes)
        return self._mine


class _Mine:
    """What one process has."""

    def __init__(self, source: FileSource, budget_bytes: int) -> None:
        info = torch.utils.data.get_worker_info()
        self.pid = os.getpid()
        self.stats = DataStats()
        self.reader = Reader(source.place, source.manifest, source.options, source.deadline_seconds)
        self.space: CacheSpace | None = None
        if source.cache is not None:
            self.space = source.cache.open(source.manifest.space, str(source.place))
        self._manifest = source.manifest
        self._is_here = self.space is None and is_on_disk(self.reader.volume.path)
        self._most = budget_bytes // (info.num_workers if info is not None else 1)
        self._lock = threading.Lock()  # guards the counts: shards are counted in threads

    def fits(self, index: int) -> bool:
        """Whether a shard can be fetched whole."""
        if self._is_here or self._manifest.size(index) <= self._most or self.path(index) is not None:
            return True
        if self.space is None:
            return False
        name, size = self._manifest.name(index), self._manifest.size(index)
        admission = self.space.admit(name, size, self._manifest.stamp(index))
        if admission is None:
            return False
        admission.cancel()
        return True

    def path(self, index: int) -> str | None:
        """Where a shard is on this machine; none if it is not."""
        if self._is_here:
            return self.reader.local_path(index)
        if self.space is None:
            return None
        name, size = self._manifest.name(index), self._manifest.size(index)
        path = self.space.path(name, size, self._manifest.stamp(index))
        return None if path is None else str(path)

    def fetch(self, index: int, offset: int, length: int) -> bytes:
        """Bytes of a shard by requests to the volume."""
        parts: list[bytes] = []
        for start in range(offset, offset + length, PIECE):
            watch = Watch()
            parts.append(self.reader.part(index, start, min(PIECE, offset + length - start), watch))
            with self._lock:
                self.stats.retries += watch.retries
                self.stats.bytes_fetched += len(parts[-1])
                if watch.seconds is not None:
                    self.stats.add_read(watch.seconds)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _local(path: str, size: int, shown: str) -> Bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{shown} could not be read: {error.strerror}. Look whether {path} is there.") from error
    return Bytes(size, functools.partial(_read, fd, shown), LOCAL_CHUNK, _closing(fd))


def _read(fd: int, shown: str, offset: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        try:
            data = os.pread(fd, length, offset)
        except OSError as error:
            raise DataError(f"{shown} could not be read at byte {offset:,}: {error.strerror}.") from error
        if not data:
            raise DataError(f"{shown} ends at byte {offset:,}: it was cut off since it was listed. Bring it back.")
        parts.append(data)
        offset += len(data)
        length -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _closing(fd: int) -> Callable[[], None]:
    is_open = [True]

    def close() -> None:
        if is_open:
            is_open.clear()
            os.close(fd)

    return close
