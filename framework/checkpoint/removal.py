"""How checkpoints and left-overs are removed from a disk.

Guarantee: `.metadata` goes first and for good before anything else does, so that no half of a checkpoint is ever
published. No symbolic link is followed. It works where nothing can be renamed. Of what saves have left behind only that
of attempts is taken which are over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from framework.checkpoint.manifest import METADATA, attempt_of
from framework.checkpoint.marks import is_running
from framework.volume.durable import force

log = logging.getLogger(__name__)

TRASH = ".trash-"
PROBE = ".probe."  # what the writer's trial file is called
WORK = (".copy-", ".fetch-")  # what a copy that is under way is called
OLD_SECONDS = 86400.0  # when a copy that another host has not touched is given up
_NO_RENAME = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something that can go.

    Args:
        path: A file or a folder.
        size: Bytes, of all files below.
        why: What it is, in words.
    """

    path: Path
    size: int
    why: str


def work_name(kind: str, what: str) -> str:
    """The name of a file or folder in which this process prepares a copy: `.copy-step_0000000005.<host>.<pid>.<start>`.

    It is swept once this process is over. Within a run, `f".fetch-{folder.name}.{tag}.part"` with a tag of
    `manifest.make_tag` does as well: it is swept by later attempts.

    Args:
        kind: `copy` or `fetch`.
        what: Name of what is copied.
    """
    me = psutil.Process()
    return f".{kind}-{what}.{_host()}.{me.pid}.{me.create_time():.0f}"


def unpublish(folder: Path) -> None:
    """Unlinks `.metadata` and forces that to disk: from now on the checkpoint does not exist.

    Raises:
        OSError: The folder is a link or cannot be changed; nothing has changed then.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.unlink(METADATA, dir_fd=fd)
        force(fd)
    finally:
        os.close(fd)


def discard(folder: Path) -> None:
    """Removes an unpublished folder; what resists is left to the next attempt's sweep.

    Raises:
        OSError: It cannot be renamed, for another reason than that nothing can be there.
    """
    trash = folder.with_name(f"{TRASH}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(folder, trash)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        trash = folder
    shutil.rmtree(trash, ignore_errors=True)


def remove(path: Path) -> bool:
    """Removes a left-over, a link itself and not what it leads to. Says whether it is gone."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error.strerror or error)
        return False
    return True


def left_in(folder: Path, attempt: int | None, used: Collection[str]) -> Iterator[Garbage]:
    """What saves have left in the folder of a step.

    Args:
        folder: The folder.
        attempt: Files of this attempt and later ones stay; none: nobody writes, no save is under way.
        used: Names of files that the published checkpoint needs.
    """
    for entry in _entries(folder):
        writer = attempt_of(entry.name)
        is_over = writer is not None and (attempt is None or writer < attempt)
        if is_over and entry.name not in used and not entry.is_dir(follow_symlinks=False):
            yield Garbage(
                Path(entry.path), size_of(Path(entry.path)), f"part of an unfinished save of attempt {writer}"
            )


def left_beside(path: Path, attempt: int | None) -> Iterator[Garbage]:
    """What saves, deletions and copies have left beside the folders of the steps.

    Args:
        path: The folder of the checkpoints.
        attempt: As in `left_in`.
    """
    for entry in _entries(path):
        where = Path(entry.path)
        if entry.is_symlink():
            continue
        if entry.name.startswith(TRASH) and entry.is_dir():
            yield Garbage(where, size_of(where), "deletion that was broken off")
        elif entry.name.startswith(PROBE) and entry.is_file():
            writer = attempt_of(entry.name)
            if writer is not None and (attempt is None or writer < attempt):
                yield Garbage(where, size_of(where), f"trial file of attempt {writer}")
        elif entry.name.startswith(WORK) and _is_abandoned(where, attempt):
            yield Garbage(where, size_of(where), "copy that was broken off")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed."""
    total = 0
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            return os.lstat(path).st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_abandoned(path: Path, attempt: int | None) -> bool:
    """Whether nobody works on a copy any more, by the attempt or the process that its name carries."""
    writer = attempt_of(path.name)
    if writer is not None:
        return attempt is None or writer < attempt
    match path.name.rsplit(".", 3):
        case [_, host, pid, started] if pid.isdecimal() and started.isdecimal():
            if host == _host():
                return not is_running(int(pid), float(started))
            with contextlib.suppress(OSError):
                return time.time() - os.lstat(path).st_mtime > OLD_SECONDS
    return False


def _host() -> str:
    return socket.gethostname().replace(".", "_").replace("/", "_")
