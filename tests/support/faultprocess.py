"""The process behind `support.faultfs`: a FUSE file system that passes everything on to a folder, except its faults.

    python faultprocess.py BACKING MOUNTPOINT SOCKET

Each connection to the Unix socket brings one JSON request in a line and gets one JSON answer. The process ends, and
takes its mount with it, when whoever started it is gone.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import mfusepy

_PR_SET_PDEATHSIG = 1
MOST_CALLS = 200_000  # that are remembered
MOST_THREADS = 256  # calls at once; the library's own default is 10


class Faults:
    """What goes wrong, for which calls, and which calls there were."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._parent = os.getppid()
        self._rules: list[dict[str, Any]] = []
        self._rate: float | None = None
        self._free_at = 0.0
        self.capacity: int | None = None
        self.calls: list[tuple[str, str]] = []

    def request(self, request: dict[str, Any], used: Callable[[], int]) -> Any:
        """Carries out what the test asked for."""
        with self._lock:
            match request.pop("do"):
                case "rule":
                    self._rules.append(request)
                case "rate":
                    self._rate = request["bytes_per_second"]
                case "full":
                    self.capacity = used() + request["after"]
                case "heal":
                    self._rules.clear()
                    self._rate = self.capacity = None
                    self._lock.notify_all()
                case "calls":
                    return self.calls
                case other:
                    raise ValueError(other)
        return None

    def meet(self, operation: str, path: str, size: int = 0) -> int | None:
        """Comes before each call: notes it, lets it wait, lets it fail.

        Returns:
            The bytes that a write may write at most, or after which a file ends for a read; none: no such fault.

        Raises:
            OSError: A fault of this call.
        """
        pause, most, error = 0.0, None, None
        with self._lock:
            if len(self.calls) < MOST_CALLS:
                self.calls.append((operation, path))
            for rule in tuple(self._rules):
                if not self._applies(rule, operation, path):
                    continue
                while rule.get("stalls") and rule in self._rules and os.getppid() == self._parent:
                    self._lock.wait(1.0)
                pause += rule.get("seconds", 0.0)
                most = rule.get("most", most)
                error = rule.get("error", error)
            if self._rate and size:
                self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
                pause += self._free_at - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        if error is not None:
            raise OSError(error, os.strerror(error))
        return most

    @staticmethod
    def _applies(rule: dict[str, Any], operation: str, path: str) -> bool:
        if rule["ops"] and operation not in rule["ops"]:
            return False
        if not fnmatch.fnmatchcase(path, rule["match"]):
            return False
        if rule["after"] > 0:
            rule["after"] -= 1
            return False
        if rule["count"] is not None:
            rule["count"] -= 1
            return bool(rule["count"] >= 0)
        return True


class PassThrough(mfusepy.Operations):
    """The file system. Paths of the faults and of the notes are relative to the mount point."""

    use_ns = True

    def __init__(self, backing: str) -> None:
        self.backing = backing
        self.faults = Faults()
        self._space = threading.Lock()

    def used(self) -> int:
        """Bytes in all files of the backing folder."""
        total = 0
        for folder, _, names in os.walk(self.backing):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
        return total

    def _meet(self, operation: str, path: str | None, size: int = 0) -> str:
        path = path or "/"  # an open file that was deleted has none
        self.faults.meet(operation, path.lstrip("/"), size)
        return self.backing + path

    def _room(self) -> int:
        capacity = self.faults.capacity
        return sys.maxsize if capacity is None else max(0, capacity - self.used())

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        place = self._meet("getattr", path)
        found = os.fstat(fh) if fh is not None else os.lstat(place)
        names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
        values: dict[str, Any] = {name: getattr(found, name) for name in names}
        times = {"st_atime": found.st_atime_ns, "st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns}
        return values | times

    def readdir(self, path: str, fh: int) -> Iterator[Any]:
        entries = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(self._meet("readdir", path))]
        yield from (".", "..")
        for name, found in entries:
            yield name, {"st_mode": stat.S_IFMT(found.st_mode), "st_ino": found.st_ino}, 0

    def open(self, path: str, flags: int) -> int:
        return os.open(self._meet("open", path), flags & ~os.O_DIRECT & ~os.O_NOFOLLOW | os.O_CLOEXEC)

    def create(self, path: str, mode: int, flags: int) -> int:
        return os.open(self._meet("create", path), flags & ~os.O_DIRECT | os.O_CREAT | os.O_CLOEXEC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        end = self.faults.meet("read", (path or "").lstrip("/"), size)
        return os.pread(fh, size if end is None else max(0, min(size, end - offset)), offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        most = self.faults.meet("write", (path or "").lstrip("/"), len(data))
        if most is not None:
            data = data[:most]
        if self.faults.capacity is None:
            return os.pwrite(fh, data, offset)
        with self._space:
            grows = max(0, offset + len(data) - os.fstat(fh).st_size)
            lacking = grows - self._room()
            if lacking >= len(data):
                raise OSError(errno.ENOSPC, "full")
            return os.pwrite(fh, data[: len(data) - max(0, lacking)], offset)

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._meet("fallocate", path)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only plain space")
        with self._space:
            if offset + size - os.fstat(fh).st_size > self._room():
                raise OSError(errno.ENOSPC, "full")
            os.posix_fallocate(fh, offset, size)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(fh if fh is not None else self._meet("truncate", path), length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        self._meet("flush", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._meet("fsync", path)
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._meet("fsyncdir", path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._meet("mkdir", path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._meet("rmdir", path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._meet("unlink", path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._meet("rename", old), self.backing + new)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self.backing + source, self._meet("link", target))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._meet("symlink", target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._meet("readlink", path))

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._meet("chmod", path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._meet("chown", path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._meet("utimens", path), ns=times, follow_symlinks=False)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._meet("statfs", path))
        values = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
        blocks = self._room() // found.f_frsize
        return values | {name: min(values[name], blocks) for name in ("f_bfree", "f_bavail")}


def _serve(server: socket.socket, system: PassThrough) -> None:
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rw") as stream:
            answer = system.faults.request(json.loads(stream.readline()), system.used)
            stream.write(json.dumps(answer) + "\n")


def main() -> None:
    backing, mountpoint, place, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(place)
        server.listen()
        system = PassThrough(backing)
        threading.Thread(target=_serve, args=(server, system), daemon=True).start()
        caches = dict.fromkeys(("entry_timeout", "attr_timeout", "negative_timeout", "ac_attr_timeout"), 0)
        options: dict[str, Any] = {"direct_io": True, "use_ino": True, "hard_remove": True, "fsname": "faultfs"}
        if (mfusepy.fuse_version_major, mfusepy.fuse_version_minor) >= (3, 12):
            options["max_threads"] = MOST_THREADS
        mfusepy.FUSE(system, mountpoint, foreground=True, **options, **caches)


if __name__ == "__main__":
    main()
