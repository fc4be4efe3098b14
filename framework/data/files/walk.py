"""Walks through a folder on a mount, which may be slow, with threads.

Guarantee: links are followed, and never in a circle. Names are the bytes that the file system has. A file that vanishes
meanwhile is left out; a folder that cannot be read is an error; a mount that fails for a moment is asked again; one
that does not answer at all is an error that names a folder, and holds up neither the caller nor the end of the process.
"""

from __future__ import annotations

import errno
import os
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from framework.data.files.manifest import text_of
from framework.ending import Background
from framework.errors import DataError

T = TypeVar("T")

THREADS = 16
CHUNK = 256  # files whose sizes one thread asks for
STALL_SECONDS = 300.0

_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EAGAIN, errno.EINTR, errno.ENOTCONN}
_GONE = {errno.ENOENT, errno.ENOTDIR}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two tries
_jitter = random.SystemRandom()  # the default generator belongs to the run


class MissingError(DataError):
    """There is no such folder."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file, or a folder directly in the place.

    Args:
        name: Relative to the place, parts separated by `/`.
        size: Bytes.
        modified: When it was last written, in nanoseconds since the epoch; 0: not known.
        tag: `tag_of` its entity tag; 0: not known.
        is_folder: Whether it is a folder.
    """

    name: bytes
    size: int = 0
    modified: int = 0
    tag: int = 0
    is_folder: bool = False


@dataclass(slots=True)
class Skipped:
    """How many files were left out, and why.

    Args:
        hidden: Files and folders whose name begins with a dot.
        empty: Files without a byte.
        others: Files of other endings.
        broken: Links that lead nowhere, or in a circle.
        special: Pipes, sockets, devices.
        loose: Files outside the class folders.
        examples: Names of a few empty ones.
    """

    hidden: int = 0
    empty: int = 0
    others: int = 0
    broken: int = 0
    special: int = 0
    loose: int = 0
    examples: list[bytes] = field(default_factory=list)

    def add_empty(self, name: bytes) -> None:
        self.empty += 1
        self.examples = sorted([*self.examples, name])[:3]

    def add(self, other: Skipped) -> None:
        for name in ("hidden", "empty", "others", "broken", "special", "loose"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.examples = sorted([*self.examples, *other.examples])[:3]

    def __str__(self) -> str:
        names = ", ".join(repr(text_of(name)) for name in self.examples)
        more = ", …" if self.empty > len(self.examples) else ""
        counts = (
            (self.hidden, "hidden"),
            (self.empty, f"empty, 0 bytes ({names}{more})"),
            (self.others, "with another ending"),
            (self.broken, "broken or circular links"),
            (self.special, "that are no regular files"),
            (self.loose, "outside the class folders"),
        )
        return ", ".join(f"{count:,} {what}" for count, what in counts if count)


@dataclass(slots=True)
class _Folder:
    """A folder to list: its name, and the folders (device, inode) that it lies in."""

    name: bytes
    above: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return text_of(self.name)


@dataclass(slots=True)
class _Names:
    """Files of a folder whose sizes are to be asked for."""

    folder: bytes
    entries: Sequence[os.DirEntry[bytes]]

    def __str__(self) -> str:
        return text_of(self.folder)


@dataclass(slots=True)
class _Outcome:
    """What became of a task."""

    files: list[Found] = field(default_factory=list)
    tasks: list[_Folder | _Names] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)


def walk(
    root: Path, extensions: tuple[str, ...] | None, depth: int | None, skipped: Skipped, patience_seconds: float
) -> Iterator[Found]:
    """All files below a folder, in no order, and the folders directly in it.

    Args:
        root: The folder.
        extensions: Endings of the files, in lower case; none: all.
        depth: How many folders deep files may lie; none: any number.
        skipped: What is left out is counted here.
        patience_seconds: How long a mount that fails is asked again.

    Raises:
        DataError: A folder cannot be read, or the mount does not answer.
    """
    tasks: queue.SimpleQueue[_Folder | _Names | None] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[_Outcome | BaseException] = queue.SimpleQueue()
    look = _Look(root, extensions, depth, patience_seconds)
    running: dict[int, _Folder | _Names] = {}
    for number in range(THREADS):
        # no executor: the interpreter waits at its end for the threads of one, and a dead mount never answers
        Background(partial(_work, number, look, tasks, outcomes, running), f"walk {number}").start()
    try:
        tasks.put(_Folder(b"", ()))
        open_tasks = 1
        while open_tasks:
            outcome = _next(root, outcomes, running)
            open_tasks += len(outcome.tasks) - 1
            for task in outcome.tasks:
                tasks.put(task)
            skipped.add(outcome.skipped)
            yield from outcome.files
    finally:
        look.is_over = True
        for _ in range(THREADS):
            tasks.put(None)


def _next(root: Path, outcomes: queue.SimpleQueue[_Outcome | BaseException], running: dict[int, Any]) -> _Outcome:
    try:
        outcome = outcomes.get(timeout=STALL_SECONDS)
    except queue.Empty:
        where = root / str(next(iter(running.values()), ""))
        raise DataError(
            f"Listing {root} has not moved for {STALL_SECONDS:g} s: the mount does not answer for {where}. Check that the "
            f"volume is mounted and its server is up."
        ) from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _work(
    number: int,
    look: _Look,
    tasks: queue.SimpleQueue[_Folder | _Names | None],
    outcomes: queue.SimpleQueue[_Outcome | BaseException],
    running: dict[int, _Folder | _Names],
) -> None:
    """The life of a thread."""
    while (task := tasks.get()) is not None and not look.is_over:
        running[number] = task
        try:
            outcomes.put(look.folder(task) if isinstance(task, _Folder) else look.names(task.folder, task.entries))
        except BaseException as error:  # raised in the thread that asked
            outcomes.put(error)
        running.pop(number, None)


class _Look:
    """What threads do to a place. Keeps nothing between two calls.

    Args:
        root, extensions, depth, patience_seconds: As in `walk`.
    """

    def __init__(
        self, root: Path, extensions: tuple[str, ...] | None, depth: int | None, patience_seconds: float
    ) -> None:
        self.is_over = False
        self._root = os.fsencode(root)
        self._endings = None if extensions is None else tuple(os.fsencode(one) for one in extensions)
        self._depth = depth
        self._patience_seconds = patience_seconds

    def folder(self, task: _Folder) -> _Outcome:
        """Lists a folder; of a large one the sizes are left to other threads."""
        outcome = _Outcome()
        path = self._path(task.name)
        try:
            status = self._insist(lambda: os.stat(path))
            if (status.st_dev, status.st_ino) in task.above:
                outcome.skipped.broken += 1
                return outcome
            entries = self._insist(lambda: _listed(path))
        except OSError as error:
            return self._lost(task, error)
        above = (*task.above, (status.st_dev, status.st_ino))
        files = []
        for entry in entries:
            if entry.name.startswith(b"."):
                outcome.skipped.hidden += 1
            elif self._is_folder(entry):
                self._enter(_joined(task.name, entry.name), above, outcome)
            else:
                files.append(entry)
        files = self._of_ending(files, outcome)
        if len(files) <= CHUNK:
            more = self.names(task.name, files)
            outcome.files += more.files
            outcome.skipped.add(more.skipped)
        else:
            outcome.tasks += [_Names(task.name, files[at : at + CHUNK]) for at in range(0, len(files), CHUNK)]
        return outcome

    def names(self, folder: bytes, entries: Sequence[os.DirEntry[bytes]]) -> _Outcome:
        """Asks for size and time of files."""
        outcome = _Outcome()
        for entry in entries:
            try:
                status = self._insist(entry.stat)
            except OSError as error:
                if error.errno not in _GONE | {errno.ELOOP}:
                    raise self._error(entry.path, error) from error
                outcome.skipped.broken += entry.is_symlink()  # else it was deleted meanwhile
                continue
            name = _joined(folder, entry.name)
            if (status.st_mode & 0o170000) != 0o100000:
                outcome.skipped.special += 1
            elif status.st_size == 0:
                outcome.skipped.add_empty(name)
            else:
                outcome.files.append(Found(name, status.st_size, status.st_mtime_ns))
        return outcome

    def _enter(self, name: bytes, above: tuple[tuple[int, int], ...], outcome: _Outcome) -> None:
        if b"/" not in name:
            outcome.files.append(Found(name, is_folder=True))
        if self._depth is None or name.count(b"/") < self._depth:
            outcome.tasks.append(_Folder(name, above))

    def _of_ending(self, entries: list[os.DirEntry[bytes]], outcome: _Outcome) -> list[os.DirEntry[bytes]]:
        if self._endings is None:
            return entries
        fitting = [entry for entry in entries if entry.name.lower().endswith(self._endings)]
        outcome.skipped.others += len(entries) - len(fitting)
        return fitting

    def _is_folder(self, entry: os.DirEntry[bytes]) -> bool:
        try:
            return self._insist(entry.is_dir)
        except OSError as error:
            if error.errno in _GONE | {errno.ELOOP}:
                return False  # `names` looks at it again
            raise self._error(entry.path, error) from error

    def _lost(self, task: _Folder, error: OSError) -> _Outcome:
        """A folder that vanished meanwhile is fine, unless it is the place itself."""
        if error.errno not in _GONE or not task.name:
            raise self._error(self._path(task.name), error) from error
        return _Outcome()

    def _insist(self, work: Callable[[], T]) -> T:
        """Does it again while the mount fails, for a while."""
        pause, deadline = _FIRST_PAUSE, 0.0
        while True:
            try:
                return work()
            except OSError as error:
                deadline = deadline or time.monotonic() + self._patience_seconds
                left = deadline - time.monotonic()
                if error.errno not in _PASSING or left <= 0 or self.is_over:
                    raise
                time.sleep(min(left, _jitter.uniform(0, pause)))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _error(self, path: bytes, error: OSError) -> DataError:
        shown, reason = text_of(path), error.strerror or str(error)
        if error.errno in _GONE:
            return MissingError(f"{shown} is no folder ({reason}). Check the path, and that the volume is mounted.")
        if error.errno in (errno.EACCES, errno.EPERM):
            return DataError(f"{shown} cannot be read: {reason}. Give this user access, or leave it out.")
        return DataError(f"{shown} cannot be listed: {reason}. Check that the volume is mounted and its server is up.")

    def _path(self, name: bytes) -> bytes:
        return os.path.join(self._root, name) if name else self._root


def _listed(path: bytes) -> list[os.DirEntry[bytes]]:
    with os.scandir(path) as found:
        return list(found)


def _joined(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name
