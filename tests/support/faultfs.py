"""A real mounted file system on which storage fails as the test says.

    from support.faultfs import FaultFS

    def test_something(faultfs: FaultFS) -> None:       # a fixture of all tests: a fresh mount, gone at the end
        store = CheckpointStore(faultfs.path / "run" / "checkpoints")
        faultfs.fail("write", match="*/__1_*")          # EIO for what rank 1 writes
        ...
        faultfs.heal()

It passes everything on to the folder `faultfs.backing`, without caches: each call is met. Operations are those of FUSE:
getattr readdir open create read write fallocate truncate flush fsync fsyncdir mkdir rmdir unlink rename link symlink
readlink chmod chown utimens statfs. Patterns match the path below the mount point; `*` matches slashes too.
Any process may switch faults, also a forked rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("faultprocess.py")
WAIT_SECONDS = 60.0
_NO_MOUNT = ("device not found", "not permitted", "mount failed", "Permission denied", "No such device")
_NO_FUSE = ("Unable to find libfuse", "No module named 'mfusepy'")


class CannotMountError(Exception):
    """No FUSE file system can be mounted here."""


class FaultFS:
    """The mount, from outside.

    Args:
        folder: Where mount point and backing folder are made.

    Attributes:
        path: The mount point.
        backing: The folder in which everything really lies.

    Raises:
        CannotMountError: The machine does not let us.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "volume"
        self.backing = folder / "backing"
        self.path.mkdir(parents=True)
        self.backing.mkdir()
        self._sockets = Path(tempfile.mkdtemp(prefix="faultfs-"))  # its path must be short
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.mount()

    def mount(self) -> None:
        """Mounts it, without faults; again after `kill` or `unmount`."""
        self.unmount()
        self._count += 1
        self._socket = self._sockets / str(self._count)
        output = self._sockets / "output"
        command = [sys.executable, str(PROGRAM), str(self.backing), str(self.path), str(self._socket), str(os.getpid())]
        with output.open("wb") as stream:
            self._process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        deadline = time.monotonic() + WAIT_SECONDS
        while not os.path.ismount(self.path):
            if self._process.poll() is not None:
                text = output.read_text(errors="replace")
                if any(sign in text for sign in (*_NO_MOUNT, *_NO_FUSE)):
                    raise CannotMountError(text.strip().splitlines()[-1] if text.strip() else "no reason given")
                raise AssertionError(f"the process of the file system ended with {self._process.returncode}\n{text}")
            assert time.monotonic() < deadline, "the file system was not mounted in time"
            time.sleep(0.005)

    def delay(self, seconds: float, *operations: str, match: str = "*", count: int | None = None) -> None:
        """Lets calls wait; without names of operations all of them."""
        self._rule(operations, match, count, seconds=seconds)

    def limit(self, bytes_per_second: float) -> None:
        """Bounds what is read and written together."""
        self._ask(do="rate", bytes_per_second=bytes_per_second)

    def fail(
        self, *operations: str, error: int = errno.EIO, match: str = "*", count: int | None = None, after: int = 0
    ) -> None:
        """Lets calls fail.

        Args:
            operations: Which; none means all.
            error: With what.
            match: For which paths.
            count: How many of them; none means all until `heal`.
            after: How many go well before.
        """
        self._rule(operations, match, count, after, error=error)

    def full(self, after: int = 0) -> None:
        """No space left once the files have grown by `after` bytes together; deleting makes room."""
        self._ask(do="full", after=after)

    def short(self, most: int = 1000, match: str = "*", count: int | None = None) -> None:
        """A write writes at most that many bytes and says so."""
        self._rule(("write",), match, count, most=most)

    def cut(self, size: int, match: str = "*", count: int | None = None) -> None:
        """Reads find the end of a file after `size` bytes, though its size is still told as it is."""
        self._rule(("read",), match, count, most=size)

    def stall(self, *operations: str, match: str = "*", count: int | None = None, after: int = 0) -> None:
        """Lets calls hang until `heal`; `after` go well before."""
        self._rule(operations, match, count, after, stalls=True)

    def no_rename(self) -> None:
        """Neither rename nor link, as on some mounted object stores; links come back with the next `mount` only."""
        self.fail("rename", "link", error=errno.ENOSYS)

    def vanish(self) -> None:
        """Every call fails with ENOTCONN until `heal`; the mount is still there."""
        self.fail(error=errno.ENOTCONN)

    def heal(self) -> None:
        """No faults from now on."""
        self._ask(do="heal")

    def calls(self, *operations: str) -> list[tuple[str, str]]:
        """What was called since it was mounted, (operation, path), in order."""
        calls = [(operation, path) for operation, path in self._ask(do="calls")]
        return [call for call in calls if not operations or call[0] in operations]

    def kill(self) -> None:
        """Kills the process of the file system: the mount stays, and every call fails with ENOTCONN."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_SECONDS)
            self._process = None

    def unmount(self) -> None:
        """Takes the mount away at once, whoever uses it: the mount point is an empty folder of the disk below."""
        while _is_mounted(self.path):
            subprocess.run(["fusermount3", "-uz", str(self.path)], check=True, timeout=WAIT_SECONDS)
        self.kill()

    def close(self) -> None:
        """Unmounts; doing so twice is fine."""
        self.unmount()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _rule(
        self, operations: tuple[str, ...], match: str, count: int | None, after: int = 0, **effect: float | int
    ) -> None:
        self._ask(do="rule", ops=operations, match=match, count=count, after=after, **effect)

    def _ask(self, **request: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(str(self._socket))
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                return json.loads(stream.readline())


def _is_mounted(path: Path) -> bool:
    """Also of a mount whose process is gone, which cannot be looked at."""
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


@pytest.fixture
def faultfs(tmp_path: Path) -> Iterator[FaultFS]:
    """A fresh mount; skips only where the machine does not let us mount one."""
    with contextlib.ExitStack() as stack:
        try:
            system = FaultFS(tmp_path / "faultfs")
        except CannotMountError as error:
            pytest.skip(f"no FUSE file system can be mounted here: {error}")
        stack.callback(system.close)
        yield system
