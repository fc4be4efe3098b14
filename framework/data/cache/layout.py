"""Where things lie in a cache, and whose it is.

    <root>/cache.json                this is a cache; nothing is ever deleted in a folder without it
    <root>/usage, locks, chores      the counter of bytes; locks of keys; who tidies up
    <root>/trash/                    what is being deleted
    <root>/data/<dataset>/
        about.json                   where the files come from, in words
        lease                        locked while a process uses the dataset; its time is that of the last use
        files/<key>                  the files, under their own names where a file system allows these
        hashed/<hh>/<hash><suffix>   those of other names
        parts/<process>.<n>.<bytes>  what is being written
        transit/<process>.<n>/       what is not kept

Guarantee: a folder that is not empty and has no marker is refused, and so is one of another user: nothing is deleted
that a cache did not write. Making a cache takes no moment in which two processes could disagree about it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from framework.errors import ConfigError
from framework.mounts import mount_of

MARKER = "cache.json"
FORMAT = "goodput-cache/1"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_LONGEST_NAME, _LONGEST_KEY = 240, 3000  # bytes; a part of a path may have 255, all of it 4096
_OTHER_PLACE = (
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL,
)  # fmt: skip
_AWAY = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "9p", "fuse", "afs", "wekafs", "pvfs", "glusterfs")
_MEMORY = ("tmpfs of", "ramfs of")


class Layout:
    """The places in a cache. Making this object touches nothing.

    Args:
        root: The folder of the cache.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.marker = root / MARKER
        self.usage = root / "usage"
        self.locks = root / "locks"
        self.chores = root / "chores"
        self.trash = root / "trash"
        self.data = root / "data"

    def dataset(self, fingerprint: str) -> Path:
        """The folder of a dataset."""
        if _PLAIN.fullmatch(fingerprint):
            return self.data / fingerprint
        return self.data / hashlib.blake2b(_raw(fingerprint), digest_size=16).hexdigest()

    def prepare(self) -> None:
        """Makes the cache, or sees that it is one of this user.

        Raises:
            ConfigError: It cannot be made, belongs to another user, or the folder is used for something else.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
            owner = self.root.stat().st_uid
            if owner != os.geteuid():
                raise ConfigError(
                    f"the cache {self.root} belongs to user {owner}, and this process runs as user {os.geteuid()}. "
                    f"Give it a folder of its own: cache.root=/path/to/folder."
                )
            if not self._is_marked():
                self._mark()
        except OSError as error:
            raise ConfigError(
                f"the cache {self.root} cannot be used: {error.strerror or error}. "
                f"Give another folder on a local disk (cache.root=/path/to/folder), or use cache=false."
            ) from error

    def exists(self) -> bool:
        """Whether there is a cache; nothing is made.

        Raises:
            ConfigError: The folder is there, and is no cache.
        """
        try:
            if self._is_marked():
                return True
            if self.root.is_dir() and not os.listdir(self.root):
                return False
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"the cache {self.root} cannot be read: {error.strerror or error}.") from error
        if self.root.exists():
            raise ConfigError(f"{self.root} is no cache: it has no {MARKER}. Give the folder that cache.root names.")
        return False

    def _is_marked(self) -> bool:
        try:
            found = json.loads(self.marker.read_text())
        except FileNotFoundError:
            return False
        except ValueError:
            found = None
        if isinstance(found, dict) and found.get("format") == FORMAT:
            return True
        raise ConfigError(
            f"{self.marker} names no format that is known here ({FORMAT}): the cache is another version's, or damaged. "
            f"Give another folder, or delete it if nothing else is in it."
        )

    def _mark(self) -> None:
        temporary = f".{MARKER}."
        others = [name for name in os.listdir(self.root) if name != MARKER and not name.startswith(temporary)]
        if others and not self._is_marked():  # another process may have made it meanwhile
            raise ConfigError(
                f"{self.root} is not empty and no cache: it has {sorted(others)[0]!r}. The cache deletes files in its "
                f"folder, so give it one of its own: an empty one, or one that does not exist."
            )
        fd, name = tempfile.mkstemp(prefix=temporary, dir=self.root)
        with open(fd, "w") as stream:
            json.dump({"format": FORMAT}, stream)
        os.replace(name, self.marker)


def places(folder: Path, key: str) -> Iterator[str]:
    """The paths that a file of a dataset may have: under its own name, if a file system may allow it, then under a hash.

    Both end with the suffix of the name: code of users looks at it, and at the folders above.
    """
    if _is_name(key):
        yield f"{folder}/files/{key}"
    name = hashlib.blake2b(_raw(key), digest_size=16).hexdigest()
    suffix = re.search(r"[.][A-Za-z0-9]{1,12}$", key)
    yield f"{folder}/hashed/{name[:2]}/{name}{suffix[0] if suffix else ''}"


def move(source: str, targets: Iterable[str]) -> str:
    """Gives a file the first of some paths that can be had; what is there is replaced. Returns it.

    Raises:
        OSError: None can be had, or the disk fails.
    """
    failure = OSError(errno.EINVAL, "no path was given")
    for target in targets:
        try:
            _rename(source, target)
            return target
        except OSError as error:
            if error.errno not in _OTHER_PLACE:
                raise
            failure = error
    raise failure


def _rename(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(source, target)


def _is_name(key: str) -> bool:
    try:
        raw = os.fsencode(key)
    except UnicodeEncodeError:
        return False
    parts = raw.split(b"/")
    is_short = len(raw) <= _LONGEST_KEY and all(len(part) <= _LONGEST_NAME for part in parts)
    return is_short and b"\0" not in raw and not any(part in (b"", b".", b"..") for part in parts)


def mark_of(key: str, size: int, stamp: str | int) -> int:
    """What a cached file has as its time of modification, in whole seconds: it tells versions of a file apart."""
    text = b"\0".join((_raw(key), str(size).encode(), _raw(str(stamp))))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 34  # 30 bits: before 2005


def place_of(key: str) -> int:
    """A number for a key, as the place of its lock."""
    return int.from_bytes(hashlib.blake2b(_raw(key), digest_size=8).digest(), "little") >> 2


def default_roots() -> list[Path]:
    """Where a cache may lie by default, best first: not on a network mount or in memory, if there is another place."""
    mine = str(os.geteuid())
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        return [Path(chosen) / "goodput" / mine]
    places = [Path(tempfile.gettempdir()) / f"goodput-{mine}"]
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        places.insert(0, Path(home) / ".cache" / "goodput" / mine)
    return sorted(places, key=_distance)


def _distance(place: Path) -> int:
    try:
        mount = mount_of(place)
    except OSError:
        return 3
    return 2 if mount.startswith(_AWAY) else 1 if mount.startswith(_MEMORY) else 0


def _raw(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # no name of a file
        return text.encode("utf-8", "surrogatepass")
