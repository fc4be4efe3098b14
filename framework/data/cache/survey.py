"""What is in a cache, and who uses it.

Guarantee: nothing is changed. What goes meanwhile is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from framework.data.cache.housekeeping import KEPT, last_use, sizes
from framework.data.cache.layout import Layout
from framework.data.cache.locks import close_private, flock, open_private, unlock


@dataclass(frozen=True, slots=True)
class Held:
    """A dataset in a cache.

    Args:
        folder: Where it lies.
        fingerprint: What identifies it.
        label: Where its files come from, in words; may be empty.
        files: How many files it has.
        bytes: Their bytes.
        transit_bytes: Bytes of files that are in use for a moment, beside these.
        last_use: When it was last used, in seconds since the epoch.
        is_in_use: Whether a live process uses it; none where the file system has no locks that would tell.
        pids: The processes, as far as they can be seen from here: not those of other containers.
    """

    folder: Path
    fingerprint: str
    label: str
    files: int
    bytes: int
    transit_bytes: int
    last_use: float
    is_in_use: bool | None
    pids: tuple[int, ...]


def survey(layout: Layout) -> list[Held]:
    """The datasets of a cache, those used last first.

    Raises:
        ConfigError: The folder is no cache.
    """
    if not layout.exists() or not layout.data.is_dir():
        return []
    found = []
    for folder in sorted(layout.data.iterdir()):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append(_held(folder))
    return sorted(found, key=lambda one: one.last_use, reverse=True)


def trash(layout: Layout) -> list[Path]:
    """What was to be deleted and is still there."""
    try:
        return sorted(layout.trash.iterdir())
    except OSError:
        return []


def _held(folder: Path) -> Held:
    files = [size for name in KEPT for size in sizes(f"{folder}/{name}")]
    about = _about(folder)
    return Held(
        folder=folder,
        fingerprint=about.get("fingerprint", folder.name),
        label=about.get("label", ""),
        files=len(files),
        bytes=sum(files),
        transit_bytes=sum(sizes(f"{folder}/transit")),
        last_use=last_use(folder),
        is_in_use=_is_in_use(folder / "lease"),
        pids=tuple(sorted(_users(folder / "lease"))),
    )


def _about(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / "about.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _is_in_use(lease: Path) -> bool | None:
    try:
        fd = open_private(lease, os.O_RDONLY)
    except OSError:
        return False
    try:
        if not flock(fd):
            return None
        unlock(fd)
        return False
    except OSError:  # TimeoutError: it is locked
        return True
    finally:
        close_private(fd)


def _users(lease: Path) -> Iterator[int]:
    """Processes that have a file open."""
    try:
        wanted = os.stat(lease)
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return
    for pid in pids:
        with contextlib.suppress(OSError):  # ended, or another user's
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), wanted):
                        yield pid
                        break
