"""The bytes and local paths of a dataset's files, in this process.

Guarantee: what is given out has the size that the list has, and was not written since. A file that is announced is
fetched once, into the cache if that takes it, while the consumer works; one that is not is fetched when it is asked
for. Every process has its own threads and connections: what a parent had is never used in a forked child. A path stays
valid until it is retired. On a disk of this machine, without a cache, files are read where they are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.data.cache.local import LocalCache
from framework.data.cache.space import Admission, CacheSpace
from framework.data.cache.transit import TransitArea
from framework.data.files.lookahead import Job, LookAhead
from framework.data.files.manifest import Manifest
from framework.data.files.reading import NODE_REQUESTS, PIECE, Reader
from framework.data.stats import DataStats
from framework.mounts import mount_of

BUDGET_BYTES = 256 << 20
DEADLINE_SECONDS = 300.0
MOST_THREADS = 64  # of one process
LOCK_SECONDS = 120.0  # for another process that fetches the same file

_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay", "apfs", "hfs"}


class FileSource:
    """Gives files by index. Picklable; a copy in another process, a forked one too, starts empty.

    Args:
        place: The path or URL of the volume.
        options: Settings of an object store.
        manifest: Its files.
        cache: Where files are kept; none: nowhere.
        as_paths: Whether files are asked for as paths, not as bytes.
        budget_bytes: Bytes that this rank may hold ahead, shared by its workers.
        threads: How many files this process fetches at once at most; default from the number of processes on this
            machine; 0: in the thread that asks, nothing ahead.
        deadline_seconds: How long a request is tried again, and how long one may have no answer.
    """

    def __init__(
        self,
        place: str | Path,
        options: Mapping[str, str] | None,
        manifest: Manifest,
        cache: LocalCache | None = None,
        *,
        as_paths: bool = False,
        budget_bytes: int = BUDGET_BYTES,
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
        self._process: _Process | None = None

    def prefetch(self, indices: Sequence[int]) -> None:
        """These files will be asked for later, in this order. Cheap; never raises."""
        try:
            self._mine().prefetch(indices)
        except Exception:  # asking for the file raises it again
            return

    def cancel_prefetch(self) -> None:
        """What was announced and not asked for yet will not be."""
        if self._process is not None and self._process.pid == os.getpid():
            self._process.cancel_prefetch()

    def bytes_of(self, index: int) -> bytes:
        """The content of a file.

        Raises:
            DataError: It could not be read, or is not as it was listed; the message names it.
        """
        return self._mine().bytes_of(index)

    def path_of(self, index: int, *, is_left: bool = False) -> str:
        """A local path of a file, which stays until `retire` has counted it.

        Args:
            index: Which.
            is_left: Whether paths that are not retired outlive this process, for the one that started it.

        Raises:
            DataError: It could not be read, or is not as it was listed; the message names it.
        """
        return self._mine().path_of(index, is_left)

    def retire(self, count: int) -> None:
        """The first `count` files given out and not yet retired are no longer in use."""
        if self._process is not None and self._process.pid == os.getpid():
            self._process.retire(count)

    def take_stats(self) -> DataStats:
        """What was counted in this process since the last call."""
        mine = self._process
        if mine is None or mine.pid != os.getpid():
            return DataStats()
        with mine.lock:
            return mine.stats.take()

    def close(self) -> None:
        """Ends threads, removes files in transit and gives the cache back; using it again starts anew. Idempotent."""
        mine, self._process = self._process, None
        if mine is not None and mine.pid == os.getpid():
            mine.end()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None}

    def _mine(self) -> _Process:
        mine = self._process
        if mine is None or mine.pid != os.getpid():
            mine = self._process = _Process(self)
            mine.end = weakref.finalize(self, mine.close)
        return mine


class _Process:
    """What one process has for a source."""

    end: Callable[[], object]  # closes it, once

    def __init__(self, source: FileSource) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()  # guards the counts
        self.stats = DataStats()
        # For the many short calls of the cache: threads that take turns cost half the CPU time of those that compete for
        # the interpreter's lock.
        self._turn = threading.Lock()
        self._manifest = source.manifest
        self._as_paths = source.as_paths
        self._deadline_seconds = source.deadline_seconds
        self._reader = Reader(source.place, source.manifest, source.options, source.deadline_seconds)
        self._space: CacheSpace | None = None
        if source.cache is not None:
            self._space = source.cache.open(source.manifest.space, str(source.place))
        self._transit: TransitArea | None = None
        self._given: deque[str | None] = deque()  # paths in transit that are in use; none for others
        workers = _workers()
        threads = source.threads
        if threads is None:
            threads = max(1, min(MOST_THREADS, NODE_REQUESTS // (workers * _ranks_here())))
            if self._space is None and is_on_disk(self._reader.volume.path):
                threads = 0
        self._ahead: LookAhead | None = None
        if threads:
            self._ahead = LookAhead(
                self._fetch,
                lambda job: self._reader.stuck(job.index, job.watch),
                threads=threads,
                budget_bytes=max(1, source.budget_bytes // workers),
                deadline_seconds=source.deadline_seconds,
            )

    def prefetch(self, indices: Sequence[int]) -> None:
        if self._ahead is not None:
            self._ahead.announce([self._job(int(index)) for index in indices])

    def cancel_prefetch(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    def bytes_of(self, index: int) -> bytes:
        job = self._got(index)
        if job.data is None:
            assert job.path is not None
            data = _read_cached(job.path, job.size)
            if data is None:  # removed by hand, or cut by a disk that lost it
                job = self._now(index, None)
                data = job.data if job.data is not None else Path(str(job.path)).read_bytes()
            return data
        return job.data

    def path_of(self, index: int, is_left: bool) -> str:
        if self._ahead is None and self._space is None and (path := self._reader.local_path(index)) is not None:
            self._given.append(None)
            return path
        job = self._got(index)
        if job.path is not None and not _is_whole(job.path, job.size):
            job = self._now(index, None)
        if job.path is not None:
            self._given.append(None)
            return job.path
        assert job.data is not None
        area = self._area(is_left)
        path = str(area.write(self._manifest.name(index), job.size, [job.data]))
        self._given.append(path)
        return path

    def retire(self, count: int) -> None:
        for _ in range(min(count, len(self._given))):
            path = self._given.popleft()
            if path is not None:
                self._area().release(path)

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        if self._ahead is not None:
            self._ahead.stop()
        if self._transit is not None:
            self._transit.close()
        if self._space is not None:
            self._space.close()

    def _job(self, index: int) -> Job:
        job = Job(index, self._manifest.size(index))
        if self._space is not None and not (self._ahead is not None and self._ahead.knows(index)):
            path = self._space.path(self._manifest.name(index), job.size, self._manifest.stamp(index))
            job.path = str(path) if path is not None else None
        return job

    def _got(self, index: int) -> Job:
        """The job of a file, done."""
        job = None
        if self._ahead is None or not self._ahead.knows(index):
            job = self._job(index)
        if job is None or job.path is None:
            job = self._now(index, job)
        if job.path is not None and job.watch.seconds is None:
            with self.lock:
                self.stats.cache_hits += 1
        return job

    def _now(self, index: int, job: Job | None) -> Job:
        size = self._manifest.size(index)
        if self._ahead is not None:
            return self._ahead.take(index, size)
        job = job or Job(index, size)
        self._fetch(job)
        return job

    def _fetch(self, job: Job) -> None:
        """Fetches a file into the cache, or into memory. Runs in the threads."""
        name, stamp = self._manifest.name(job.index), self._manifest.stamp(job.index)
        try:
            with self._turn:
                admission = None if self._space is None else self._space.admit(name, job.size, stamp)
            if self._space is None or admission is None:
                job.data = self._reader.whole(job.index, job.watch)
                return
            try:
                with self._space.lock(name, min(LOCK_SECONDS, self._deadline_seconds / 2)):
                    path = self._space.path(name, job.size, stamp)  # another process may just have fetched it
                    if path is None:
                        path = self._keep(job, admission)
                    if path is not None:
                        job.path = str(path)
                        if self._as_paths:
                            job.data = None
            finally:
                admission.cancel()
            if job.path is None and job.data is None:  # the disk of the cache failed
                job.data = self._reader.whole(job.index, job.watch)
        finally:
            self._count(job)

    def _keep(self, job: Job, admission: Admission) -> Path | None:
        if self._as_paths and job.size > PIECE:
            return admission.write(self._reader.pieces(job.index, job.watch))
        job.data = self._reader.whole(job.index, job.watch)
        with self._turn if job.size <= PIECE else contextlib.nullcontext():
            return admission.write([job.data])

    def _count(self, job: Job) -> None:
        watch = job.watch
        with self.lock:
            self.stats.retries += watch.retries
            if watch.seconds is not None:
                self.stats.cache_misses += 1
                self.stats.bytes_fetched += job.size
                self.stats.add_read(watch.seconds)

    def _area(self, is_left: bool = False) -> TransitArea:
        if self._transit is None:
            parent = multiprocessing.parent_process()
            user = parent.pid if parent is not None and _is_worker() else None  # who uses what a worker gives
            if self._space is not None:
                self._transit = self._space.transit(parent=user, is_left=is_left and user is not None)
            else:
                folder = Path(tempfile.gettempdir()) / f"goodput-transit-{os.geteuid()}"
                self._transit = TransitArea(folder, parent=user, is_left=is_left and user is not None)
        return self._transit


def is_on_disk(path: Path | None) -> bool:
    """Whether a folder is on a disk of this machine, or in its memory, where reading ahead or caching wins nothing."""
    if path is None:
        return False
    try:
        return mount_of(path).partition(" ")[0] in _DISKS
    except OSError:
        return False


def _is_whole(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def _read_cached(path: str, size: int) -> bytes | None:
    """The content of a file in the cache; none if it is not whole."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(fd, size + 1)
        while len(data) < size and (more := os.read(fd, size + 1 - len(data))):
            data += more
    except OSError:
        return None
    finally:
        os.close(fd)
    return data if len(data) == size else None


def _is_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None


def _workers() -> int:
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return info.num_workers if info is not None else 1


def _ranks_here() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else 1
