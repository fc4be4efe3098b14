"""Tidying up: what killed processes left, datasets that nobody uses, and the count of bytes.

Guarantee: a dataset goes as a whole, the one that was used longest ago first, and only if no live process holds its
lease and it has not been used for a while. What a live process writes or reads in transit stays. Nobody waits for
another's tidying, and nobody tidies for longer than asked in one go. Whatever fails is left for the next time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from framework.data.cache.layout import Layout
from framework.data.cache.living import is_alive
from framework.data.cache.locks import close_private, exclusive, flock, open_private, unlock
from framework.data.cache.usage import Usage

IDLE_SECONDS = 600.0  # a job that was killed is often back by then
FOREIGN_SECONDS = 3600.0  # after which what another machine left counts as left behind
RECOUNT_SECONDS = 3600.0
KEPT = ("files", "hashed")  # the folders of a dataset whose files are counted
_LOOK_EVERY = 32  # files between two looks at the clock


def sweep(folder: Path, usage: Usage) -> None:
    """Removes what dead processes left in the folder of a dataset: half-written files and what was in transit."""
    for part in _entries(folder / "parts"):
        if _is_abandoned(part, part.path):
            size = reserved(part.name)
            with contextlib.suppress(OSError):
                os.unlink(part.path)
                usage.add(-size)
    sweep_transit(folder / "transit")


def sweep_transit(folder: Path) -> None:
    """Removes what dead processes had in transit."""
    for area in _entries(folder):
        if _is_abandoned(area, os.path.join(area.path, "lease")):
            shutil.rmtree(area.path, ignore_errors=True)


def reserved(name: str) -> int:
    """The bytes that were counted for a half-written file, which end its name."""
    size = name.rpartition(".")[2]
    return int(size) if size.isdecimal() else 0


def _is_abandoned(entry: os.DirEntry[str], lock: str) -> bool:
    """Whether nobody uses a file or folder: its process is dead or another machine's and quiet, and it is not locked."""
    alive = is_alive(entry.name)
    try:
        if alive or (alive is None and time.time() - entry.stat(follow_symlinks=False).st_mtime < FOREIGN_SECONDS):
            return False
        fd = open_private(lock, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if flock(fd):
            unlock(fd)
        return True
    except OSError:  # TimeoutError: it is in use
        return False
    finally:
        close_private(fd)


class Housekeeping:
    """Makes room in a cache. Making this object touches nothing.

    Args:
        layout: The cache.
        usage: Its counter.
    """

    def __init__(self, layout: Layout, usage: Usage) -> None:
        self._layout = layout
        self._usage = usage

    def make_room(self, has_room: Callable[[], bool], seconds: float) -> bool:
        """Counts anew if that is due, and deletes what nobody uses until there is room, or the time is over.

        Args:
            has_room: Whether there is room now.
            seconds: How long this may delete; counting may take longer, but is seldom due.

        Returns:
            Whether it may be worth to ask again soon: something was deleted, or somebody else is at it.
        """
        deadline = time.monotonic() + seconds
        try:
            with exclusive(self._layout.chores):
                self.recount_if_due()
                if has_room():
                    return True
                return self._delete(has_room, deadline)
        except TimeoutError:
            return True
        except OSError:
            return False

    def recount_if_due(self) -> None:
        """Counts all files if the counter is not known, or was not made anew for an hour.

        Raises:
            OSError: They cannot be counted.
        """
        count = self._usage.read()
        if count is None or not 0 <= time.time() - count.counted < RECOUNT_SECONDS:
            self._usage.recount(lambda: held(self._layout))

    def _delete(self, has_room: Callable[[], bool], deadline: float) -> bool:
        is_changed = False
        for trash in self._unused():
            is_changed = True
            freed = 0
            try:
                for number, size in enumerate(_deleted(trash), start=1):
                    freed += size
                    if number % _LOOK_EVERY == 0 and time.monotonic() > deadline:
                        break
            finally:
                self._usage.add(-freed)
            if has_room() or time.monotonic() > deadline:
                break
        return is_changed

    def _unused(self) -> Iterator[str]:
        """Folders that may go, in the trash: what is there already, then dataset after dataset."""
        for entry in _entries(self._layout.trash):
            yield entry.path
        datasets = sorted(self._datasets())
        for _, folder in datasets:
            sweep(folder, self._usage)
        for last_use, folder in datasets:
            if time.time() - last_use >= IDLE_SECONDS:
                with contextlib.suppress(OSError):
                    trash = self.set_aside(folder)
                    if trash is not None:
                        yield str(trash)

    def _datasets(self) -> Iterator[tuple[float, Path]]:
        for entry in _entries(self._layout.data):
            with contextlib.suppress(OSError):
                yield last_use(Path(entry.path)), Path(entry.path)

    def set_aside(self, folder: Path, *, force: bool = False) -> Path | None:
        """Moves a dataset that nobody uses to the trash.

        Args:
            folder: Its folder.
            force: Also if it is in use, or that cannot be told.

        Returns:
            Where it is now; none if it is in use, or the file system has no locks that would tell.

        Raises:
            OSError: It cannot be moved.
        """
        target = self._layout.trash / f"{folder.name}-{uuid.uuid4().hex[:8]}"
        self._layout.trash.mkdir(exist_ok=True)
        fd = open_private(folder / "lease", os.O_RDWR | os.O_CREAT)
        try:
            if not force and not flock(fd):
                return None
            os.rename(folder, target)  # while it is locked: whoever waits for it sees that it has gone
            unlock(fd)
            return target
        except TimeoutError:
            return None
        finally:
            close_private(fd)

    def clear(self, folder: Path, *, force: bool = False, report: Callable[[int], object] = bool) -> int | None:
        """Deletes a dataset at once.

        Args:
            folder: Its folder.
            force: Also if it is in use.
            report: Is called with the bytes of each file that went.

        Returns:
            The bytes; none if it is in use.

        Raises:
            OSError: It cannot be deleted.
        """
        try:
            trash = self.set_aside(folder, force=force)
        except FileNotFoundError:
            if folder.exists():
                raise
            return 0  # another process was faster
        return None if trash is None else self.empty(trash, report)

    def empty(self, trash: Path, report: Callable[[int], object] = bool) -> int:
        """Deletes a folder in the trash. Returns its bytes."""
        freed = 0
        try:
            for size in _deleted(str(trash)):
                freed += size
                report(size)
        finally:
            self._usage.add(-freed)
        return freed


def last_use(folder: Path) -> float:
    """When a dataset was last used, in seconds since the epoch.

    Raises:
        OSError: It is gone.
    """
    try:
        return os.stat(folder / "lease").st_mtime
    except FileNotFoundError:
        return os.stat(folder).st_mtime


def held(layout: Layout) -> int:
    """Bytes of all files in a cache, and of those that are being written."""
    datasets = [entry.path for place in (layout.data, layout.trash) for entry in _entries(place)]
    writing = sum(reserved(part.name) for folder in datasets for part in _entries(f"{folder}/parts"))
    return writing + sum(size for folder in datasets for name in KEPT for size in sizes(f"{folder}/{name}"))


def sizes(folder: str) -> Iterator[int]:
    """The size of every file below a folder; what goes meanwhile is left out."""
    pending = [folder]
    while pending:
        for entry in _entries(pending.pop()):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield entry.stat(follow_symlinks=False).st_size


def _deleted(folder: str, kind: str | None = None) -> Iterator[int]:
    """Deletes the folder of a dataset; gives the counted bytes of each file that went.

    Args:
        folder: A folder.
        kind: In which of the dataset's folders it is; none: it is the dataset's own.
    """
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _deleted(entry.path, kind or entry.name)
            continue
        with contextlib.suppress(OSError):
            size = entry.stat(follow_symlinks=False).st_size if kind in KEPT else 0
            os.unlink(entry.path)
            yield reserved(entry.name) if kind == "parts" else size
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
