"""Marks beside the checkpoints that keep them from being deleted: pins, readers' leases, what the run resumed from.

Guarantee: a mark is a file of its own in `checkpoints/marks/`: it moves with the run and changes no byte of a
checkpoint. Setting one and deleting a checkpoint exclude each other: either the mark is seen, or whoever sets it is
told that the checkpoint is gone (on mounts without locks the moment between looking and deleting remains). The lease of
a process that has died, or that another host has not renewed in time, does not count and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from framework.checkpoint import files
from framework.checkpoint.manifest import METADATA
from framework.errors import CheckpointError
from framework.volume.durable import write_all

log = logging.getLogger(__name__)

MARKS = "marks"
LEASE_SECONDS = 300.0  # how long the lease of another host counts without renewal
RENEW_SECONDS = 60.0
LOCK_SECONDS = 30.0  # a lock is held for some file operations
_PIN, _LEASE, _RESUMED = "pin", "lease", "resumed"
_NAME = re.compile(rf"({_PIN}|{_LEASE}|{_RESUMED})\.step_(\d{{10,}})(?:\.(.+))?")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EPERM)


@dataclass(frozen=True, slots=True)
class _Mark:
    kind: str
    step: int
    rest: str
    path: Path


class Marks:
    """The marks on the checkpoints of one run. Making this object touches nothing.

    Args:
        path: The folder of the checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / MARKS

    def pin(self, step: int) -> None:
        """Keeps a checkpoint until it is unpinned. Pinning twice is fine.

        Raises:
            CheckpointError: There is no such checkpoint, or the mark cannot be written.
        """
        self._expect(step)
        try:
            with self.exclusive():
                self._expect(step)  # it may have gone while this waited
                self._create(_name(_PIN, step), f"pinned {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        except OSError as error:
            raise _failed(self.folder / _name(_PIN, step), "written", error) from error

    def unpin(self, step: int) -> bool:
        """Takes the pin away; the checkpoint itself stays until retention finds that nothing keeps it.

        Returns:
            Whether it was pinned.

        Raises:
            CheckpointError: The mark cannot be removed.
        """
        path = self.folder / _name(_PIN, step)
        try:
            os.unlink(path)
            files.sync_folder(self.folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _failed(path, "removed", error) from error
        self._tidy()
        return True

    def pinned(self) -> frozenset[int]:
        """The steps with a pin.

        Raises:
            CheckpointError: The marks cannot be read.
        """
        return frozenset(mark.step for mark in self._all() if mark.kind == _PIN)

    @contextlib.contextmanager
    def lease(self, step: int) -> Iterator[None]:
        """Keeps a checkpoint while this process reads it. Where the mark cannot be written it is read without.

        Raises:
            CheckpointError: There is no such checkpoint any more.
        """
        path = self.folder / f"{_name(_LEASE, step)}.{uuid.uuid4().hex[:12]}"
        self._expect(step)
        try:
            with self.exclusive():
                self._expect(step)  # it may have gone while this waited
                self._create(path.name, _lease_text(step))
        except OSError as error:
            log.info("step %d is read without a lease: %s cannot be written: %s", step, path, error.strerror or error)
            yield
            return
        pid = os.getpid()
        ended = threading.Event()
        thread = threading.Thread(target=_renew, args=(path, step, ended), name="reader-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if os.getpid() == pid:  # a forked child that leaves the block does not end its parent's lease
                ended.set()
                thread.join(5)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                self._tidy()

    def leased(self) -> frozenset[int]:
        """The steps that somebody reads now. Leases that count no more are removed.

        Raises:
            CheckpointError: The marks cannot be read.
        """
        return self._steps_of_leases(self._all())

    def note_resumed(self, step: int, attempt: int) -> None:
        """Notes what this attempt has resumed from: that one stays until the attempt has published one of its own.

        What cannot be written is only warned about: no run ends for it.
        """
        name = f"{_name(_RESUMED, step)}.{attempt:06d}"
        try:
            before = [mark for mark in self._all() if mark.kind == _RESUMED and mark.path.name != name]
            self._create(name, "")
            for mark in before:
                os.unlink(mark.path)
        except (OSError, CheckpointError) as error:
            log.warning("%s could not be noted: %s", self.folder / name, error)

    def resumed(self) -> tuple[int, int] | None:
        """Step and attempt of the newest note of what was resumed from, or none.

        Raises:
            CheckpointError: The marks cannot be read.
        """
        return _newest_note(self._all())

    def protected(self, attempts: Sequence[int]) -> frozenset[int]:
        """The steps that retention must leave alone because of a mark.

        Args:
            attempts: The attempts that wrote the good checkpoints there are.

        Raises:
            CheckpointError: The marks cannot be read.
        """
        marks = self._all()
        steps = {mark.step for mark in marks if mark.kind == _PIN} | self._steps_of_leases(marks)
        note = _newest_note(marks)
        if note is not None and not any(attempt >= note[1] for attempt in attempts):
            steps.add(note[0])
        return frozenset(steps)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """While it lasts nobody else marks or deletes a checkpoint. Not to be entered twice.

        Raises:
            OSError: The folder cannot be opened, or somebody holds the lock for too long.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            is_locked = _lock(fd, self.path)
            try:
                yield
            finally:
                if is_locked:  # a process forked meanwhile has the descriptor too: closing alone would not unlock
                    fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _expect(self, step: int) -> None:
        folder = self.path / f"step_{step:010d}"
        try:
            os.lstat(folder / METADATA)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"There is no checkpoint {folder}, or it was deleted just now. `ls` shows which there are."
            ) from error
        except OSError as error:
            raise _failed(folder, "read", error) from error

    def _create(self, name: str, text: str) -> None:
        path = self.folder / name
        for last in (False, False, True):
            is_new = not self.folder.is_dir()
            self.folder.mkdir(exist_ok=True)
            try:
                _write(path, text)
                break
            except FileNotFoundError:  # whoever removed the last mark removed the folder with it
                if last:
                    raise
        files.sync_folder(self.folder)
        if is_new:
            files.sync_folder(self.path)

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):  # only an empty folder goes
            os.rmdir(self.folder)

    def _all(self) -> list[_Mark]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(self.folder, "read", error) from error
        matches = [match for match in map(_NAME.fullmatch, sorted(names)) if match]
        return [_Mark(match[1], int(match[2]), match[3] or "", self.folder / match[0]) for match in matches]

    def _steps_of_leases(self, marks: Sequence[_Mark]) -> frozenset[int]:
        steps = set()
        for mark in marks:
            if mark.kind != _LEASE:
                continue
            if _is_live(mark.path):
                steps.add(mark.step)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(mark.path)
        return frozenset(steps)


def is_running(pid: int, started: float) -> bool:
    """Whether the process of this id that began then (seconds since the epoch) still runs on this host."""
    try:
        process = psutil.Process(pid)
        # a killed process stays in the table until its parent asks for its exit code
        return abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(kind: str, step: int) -> str:
    return f"{kind}.step_{step:010d}"


def _newest_note(marks: Sequence[_Mark]) -> tuple[int, int] | None:
    notes = [(int(mark.rest), mark.step) for mark in marks if mark.kind == _RESUMED and mark.rest.isdecimal()]
    attempt, step = max(notes, default=(0, 0))
    return (step, attempt) if notes else None


def _lease_text(step: int) -> str:
    me = psutil.Process()
    lease = {
        "step": step, "host": socket.gethostname(), "pid": me.pid, "started": me.create_time(),
        "expires": time.time() + LEASE_SECONDS,
    }  # fmt: skip
    return json.dumps(lease) + "\n"


def _renew(path: Path, step: int, ended: threading.Event) -> None:
    while not ended.wait(RENEW_SECONDS):
        with contextlib.suppress(OSError):  # the next renewal may work
            _write(path, _lease_text(step))


def _is_live(path: Path) -> bool:
    try:
        lease = json.loads(path.read_text())
        host, pid, started, expires = (lease[name] for name in ("host", "pid", "started", "expires"))
        return is_running(pid, started) if host == socket.gethostname() else time.time() < expires
    except FileNotFoundError:
        return False
    except OSError:  # what cannot be read may count
        return True
    except (ValueError, KeyError, TypeError):  # it is being written, or its writer died over it
        return _age(path) < LEASE_SECONDS


def _age(path: Path) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _lock(fd: int, path: Path) -> bool:
    """Takes the lock on a folder. False where the mount has no locks."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path} is locked for more than {LOCK_SECONDS:g} s by another process, which marks or deletes a "
                    f"checkpoint there. Look for one that hangs."
                ) from error
            time.sleep(0.01)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _failed(path: Path, what: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} could not be {what}: {error.strerror or error}")
