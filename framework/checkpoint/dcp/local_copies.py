"""Copies on this host of checkpoints that lie elsewhere.

Guarantee: a copy is only ever a source of bytes that are compared with the checksums of the checkpoint itself, so an
old or damaged one cannot be taken for it. A folder that a live process of this host uses is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from framework.errors import CheckpointError

_BUSY = re.compile(r"\.busy-(\d+)-.*")
_SHARD = re.compile(r"__(\d+)_\d+\.([0-9a-f]+)\.distcp")


class LocalCopy:
    """The folder of one checkpoint's copy on this host, beside those of the checkpoints next to it.

    Args:
        place: URL of the checkpoint.
        root: Folder of all copies; none: one in the user's cache.
    """

    def __init__(self, place: str, root: str | Path | None = None) -> None:
        parent, _, name = place.rstrip("/").rpartition("/")
        self._root = Path(root).absolute() if root is not None else None
        self._group = _digest(parent)
        self._name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name).strip('.')[:80]}-{_digest(place.rstrip('/'))[:8]}"

    @property
    def folder(self) -> Path:
        """Where the copy lies, whether or not there is one."""
        return (self._root or default_root()) / self._group / self._name

    @contextlib.contextmanager
    def used(self, tag: str, mark: str = "written") -> Iterator[Path]:
        """Makes the folder and keeps it from being removed meanwhile; when that ends well it counts as a copy.

        Args:
            tag: Tells this use from others.
            mark: How the copy came about: `written` or `read`.

        Raises:
            CheckpointError: It cannot be made.
        """
        folder = self.folder
        busy = folder / f".busy-{os.getpid()}-{tag}"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._alone():
                folder.mkdir(exist_ok=True, mode=0o700)
                busy.touch()
        except OSError as error:
            raise CheckpointError(
                f"{folder}, the local copy, cannot be written: {error.strerror}. Give another folder as local=."
            ) from error
        try:
            yield folder
            with contextlib.suppress(OSError), self._alone():
                os.replace(busy, folder / f".{mark}-{tag}")
                remove(
                    folder / name for name in _names(folder) if name.startswith(f".{mark}-") and not name.endswith(tag)
                )
                os.utime(folder)
        finally:
            with contextlib.suppress(OSError):
                busy.unlink()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps the other ranks of this host from removing a folder before it is marked as used."""
        with (self.folder.parent / ".lock").open("wb") as stream:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def prune(self, keep: int, *, spares_own: bool = False) -> None:
        """Removes all copies of this group but the newest `keep`, and what killed processes have left.

        Args:
            keep: How many stay.
            spares_own: Leaves this copy alone and does not count it.
        """
        with contextlib.suppress(OSError), self._alone():
            copies = []
            for folder in _folders(self.folder.parent):
                names = _names(folder)
                if _is_busy(names) or (spares_own and folder == self.folder):
                    continue
                is_whole = any(name.startswith((".written-", ".read-")) for name in names)
                with contextlib.suppress(OSError):
                    copies.append((is_whole, folder.stat().st_mtime_ns, folder))
            copies.sort(reverse=True)
            good = sum(is_whole for is_whole, _, _ in copies)
            for _, _, folder in copies[min(keep, good) :]:
                shutil.rmtree(folder, ignore_errors=True)

    def prune_read(self, names: set[str]) -> None:
        """Removes what only reading has brought here and this checkpoint does not need.

        Args:
            names: The files of this checkpoint.
        """
        with contextlib.suppress(OSError), self._alone():
            for folder in _folders(self.folder.parent):
                found = _names(folder)
                if _is_busy(found) or any(name.startswith(".written-") for name in found):
                    continue
                if folder == self.folder:
                    self.keep_only(names)
                elif any(name.startswith(".read-") for name in found):
                    shutil.rmtree(folder, ignore_errors=True)

    def forget_older(self, rank: int) -> None:
        """Removes this rank's files of all saves of this checkpoint but the latest, before it writes new ones."""
        by_tag: dict[str, list[Path]] = {}
        for name in _names(self.folder):
            if (match := _SHARD.fullmatch(name)) and int(match[1]) == rank:
                by_tag.setdefault(match[2], []).append(self.folder / name)
        if len(by_tag) < 2:
            return
        latest = max(by_tag, key=lambda tag: max(_modified(path) for path in by_tag[tag]))
        for tag, paths in by_tag.items():
            if tag != latest:
                remove(paths)

    def keep_only(self, names: set[str]) -> None:
        """Removes what is no part of the copy as it is now."""
        remove(self.folder / name for name in _names(self.folder) if name not in names and not name.startswith("."))


def default_root() -> Path:
    """Where copies lie if no folder is given: the user's cache, or a temporary folder if that cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "goodput-framework" / "volumes"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(cache, os.W_OK):
            return cache
    other = Path(tempfile.gettempdir()) / f"goodput-framework-{os.getuid()}"
    with contextlib.suppress(OSError):
        other.mkdir(mode=0o700, exist_ok=True)
        if other.lstat().st_uid == os.getuid() and not other.is_symlink():
            return other
    raise CheckpointError(f"Neither {cache} nor {other} can be written for local copies. Give a folder as local=.")


def remove(paths: Iterator[Path] | list[Path]) -> None:
    """Removes files, as far as that works."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _folders(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder) if (folder / name).is_dir() and not (folder / name).is_symlink()]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _is_busy(names: list[str]) -> bool:
    return any(_is_alive(int(match[1])) for name in names if (match := _BUSY.fullmatch(name)))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
