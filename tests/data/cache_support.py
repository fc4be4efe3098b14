"""What the tests of the cache share: files with a known content, and processes that use the cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.data.cache import CacheSpace, LocalCache
from framework.data.cache.housekeeping import held, sizes

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))  # for syscalls

WAIT_SECONDS = 60.0
ALL = {"limit": "100%", "min_free": 0}


def content(key: str, size: int, stamp: str | int = "") -> bytes:
    """What a file of the volume holds."""
    seed = hashlib.blake2b(f"{key}/{stamp}".encode("utf-8", "surrogatepass")).digest()
    return (seed * (size // len(seed) + 1))[:size]


def keep(space: CacheSpace, key: str, size: int, stamp: str | int = "") -> Path | None:
    """Puts a file into the cache. Returns where it is; none: it was not taken."""
    admission = space.admit(key, size, stamp)
    if admission is None:
        return None
    data = content(key, size, stamp)
    return admission.write([data[: size // 2], memoryview(data)[size // 2 :]])


def read(space: CacheSpace, key: str, size: int, stamp: str | int = "") -> bool:
    """Whether the cache has a file; what it has is right."""
    path = space.path(key, size, stamp)
    if path is None:
        return False
    assert path.read_bytes() == content(key, size, stamp), path
    return True


def counted(cache: LocalCache) -> int:
    """What the counter says."""
    count = cache.usage.read()
    assert count is not None
    return count.total


def kept_bytes(cache: LocalCache) -> int:
    """Bytes of the files that are there."""
    return sum(
        size for name in ("files", "hashed") for one in cache.layout.data.glob(f"*/{name}") for size in sizes(str(one))
    )


def assert_counted(cache: LocalCache) -> None:
    """The counter says what is there."""
    assert counted(cache) == kept_bytes(cache) == held(cache.layout)


def make_idle(space: CacheSpace, seconds: float) -> None:
    """A dataset that was not used for so long."""
    then = time.time() - seconds
    os.utime(space.folder / "lease", (then, then))


def fork(body: Callable[[], object]) -> int:
    """Runs it in a child, which dies with this process; an exception is exit code 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    """The exit code of a child, once it has ended, in time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"process {pid} did not end in time")
        time.sleep(0.005)


@contextmanager
def another(body: Callable[[], object]) -> Iterator[int]:
    """A process that does it, and then waits; killed at the end. Entered once it has done it."""
    ours, theirs = os.pipe()

    def run() -> None:
        os.close(ours)
        kept = body()  # what it returns lives on
        os.write(theirs, b"x")
        time.sleep(WAIT_SECONDS)
        del kept

    pid = fork(run)
    os.close(theirs)
    try:
        assert os.read(ours, 1) == b"x", "it failed"
        yield pid
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
