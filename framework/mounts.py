"""Which mounted file system a folder lies on.

Guarantee: two answers differ when something was mounted or unmounted between the folder and the root in the meantime,
so that whoever remembers the first answer never takes the empty folder below a mount point for the volume that was
there. The same volume mounted again at the same place is the same mount.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from framework.errors import CheckpointError

DISKS = frozenset(("ext2", "ext3", "ext4", "xfs", "f2fs", "overlay"))


def mount_of(folder: Path | str) -> str:
    """The mount of a folder, in words: kind, source and mount point.

    Args:
        folder: It need not exist; then it is the mount on which it would be made.

    Raises:
        OSError: The folder cannot be reached, as on a network volume that is away.
    """
    path = Path(folder).absolute()
    while True:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            break
        except (FileNotFoundError, NotADirectoryError):
            if path == path.parent:
                raise
            path = path.parent
    try:
        return _of_open(fd)
    finally:
        os.close(fd)


def _of_open(fd: int) -> str:
    device = os.fstat(fd).st_dev
    try:
        number = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE)
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:  # no /proc
        number, lines = None, []
    for line in lines if number else []:
        # id, parent, device, root, mount point, options, optional fields, "-", kind, source, ...
        fields, _, origin = line.partition(" - ")
        parts = fields.split()
        if number and parts[0] == number[1]:
            kind, source = origin.split()[:2]
            inside = "" if parts[3] == "/" else f"[{parts[3]}]"
            return f"{kind} of {source}{inside} at {parts[4]}"
    return f"device {device}"


def is_on_disk(path: Path | str) -> bool:
    """Whether a path lies on a disk of this host, by a file system whose ways are known."""
    try:
        return mount_of(path).split()[0] in DISKS
    except OSError:
        return False


class Mounted:
    """Remembers on which mount a folder lies.

    Args:
        folder: The folder; it need not exist.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        self._mount: str | None = None
        self.is_same()

    def is_same(self) -> bool:
        """Whether the folder is on the mount on which it was first seen; also while that cannot be told."""
        return self._other() is None

    def check(self) -> None:
        """Raises:
        CheckpointError: The folder is on another mount now."""
        other = self._other()
        if other is not None:
            raise CheckpointError(
                f"{self.folder} was on {self._mount} when this run began, and would be on {other} now: the volume is "
                f"no longer mounted there. Mount it again; nothing was written below its mount point."
            )

    def _other(self) -> str | None:
        try:
            now = mount_of(self.folder)
        except OSError:  # out of reach: whatever is done with it says so
            return None
        self._mount = self._mount or now
        return now if now != self._mount else None
