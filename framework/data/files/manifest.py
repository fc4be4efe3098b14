"""The files of a dataset: names, sizes and what tells whether one was changed, packed.

Guarantee: the same files give the same manifest on every machine, sorted by the bytes of their names, which are never
normalised; its fingerprint depends on names and sizes alone. A million files take about 60 MB in a few arrays, which
forked workers share, and no list of strings. A packed manifest that was damaged is refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from framework.errors import DataError

Numbers = npt.NDArray[np.int64]

_MAGIC = b"goodput files/1\n"  # the number changes with the format
_HEAD = struct.Struct("<QQQ?")  # files, bytes of names, bytes of the origin, whether there are stamps
_DIGEST = 16


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The files below one place. Made by `Manifest.of` or `Manifest.unpack`.

    Args:
        origin: The path or URL that the names are relative to.
        names: All names, one after the other; parts are separated by `/`.
        ends: Where each name ends in `names`, int64 `[files]`.
        sizes: Bytes of each file, int64 `[files]`.
        modified: When each was last written, in nanoseconds since the epoch, int64 `[files]`; 0: not known.
        tags: `tag_of` the entity tag of each, int64 `[files]`; 0: not known.

    Attributes:
        fingerprint: Of names and sizes, 32 hexadecimal digits.
    """

    origin: str
    names: bytes
    ends: Numbers
    sizes: Numbers
    modified: Numbers
    tags: Numbers
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(b"files/1|%d|" % len(self.ends), digest_size=16)
        for part in (self.ends.astype("<i8"), self.sizes.astype("<i8")):
            digest.update(part.data)
        digest.update(self.names)
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    @classmethod
    def of(
        cls,
        origin: str,
        names: Sequence[bytes],
        sizes: Sequence[int],
        modified: Sequence[int],
        tags: Sequence[int] = (),
    ) -> Manifest:
        """A manifest of files in any order.

        Args:
            origin: The path or URL that the names are relative to.
            names: Relative names.
            sizes: Bytes of each.
            modified: When each was last written, in nanoseconds; 0: not known.
            tags: `tag_of` the entity tag of each; empty: not known.
        """
        places = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
        ordered = [names[place] for place in places.tolist()]

        def sorted_(values: Sequence[int]) -> Numbers:
            return np.asarray(values, dtype=np.int64)[places]

        return cls(
            origin,
            b"".join(ordered),
            np.cumsum(np.fromiter(map(len, ordered), dtype=np.int64, count=len(ordered))),
            sorted_(sizes),
            sorted_(modified),
            sorted_(tags) if len(tags) else np.zeros(len(names), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def raw(self, index: int) -> bytes:
        """The relative name of a file as it is on the volume; `index` from 0 to `len - 1`."""
        start = int(self.ends[index - 1]) if index else 0
        return self.names[start : int(self.ends[index])]

    def name(self, index: int) -> str:
        """The relative name of a file; bytes that are no UTF-8 come as surrogates, as from `os.fsdecode`."""
        return text_of(self.raw(index))

    def size(self, index: int) -> int:
        """Bytes of a file."""
        return int(self.sizes[index])

    def stamp(self, index: int) -> int:
        """What tells versions of a file apart in a cache: its tag, or else when it was written."""
        return int(self.tags[index]) or int(self.modified[index])

    @property
    def space(self) -> str:
        """What identifies the place in a cache: files that come or go there leave the others of it cached."""
        return hashlib.blake2b(b"space/1|" + bytes_of(self.origin), digest_size=16).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return int(self.sizes.sum())

    def raws(self) -> list[bytes]:
        """All names, as a list: large."""
        ends = self.ends.tolist()
        return [self.names[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def pack(self, *, is_portable: bool = False) -> bytes:
        """The manifest as bytes.

        Args:
            is_portable: Whether only names and sizes go in, which are the same for a copy of the files elsewhere.
        """
        has_stamps, origin = not is_portable, b"" if is_portable else bytes_of(self.origin)
        parts = [
            _MAGIC,
            _HEAD.pack(len(self), len(self.names), len(origin), has_stamps),
            origin,
            np.diff(self.ends, prepend=0).astype("<u4").tobytes(),
            self.sizes.astype("<i8").tobytes(),
        ]
        if has_stamps:
            parts += [self.modified.astype("<i8").tobytes(), self.tags.astype("<i8").tobytes()]
        data = b"".join([*parts, self.names])
        return data + _digest(data)

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """What `pack` gave.

        Raises:
            DataError: It is none, of another version, or damaged.
        """
        if not data.startswith(_MAGIC):
            raise DataError(
                f"These {len(data)} bytes are no list of files that this version reads: it begins with "
                f"{data[: len(_MAGIC)]!r}, not {_MAGIC!r}. Use the version of the framework that wrote it."
            )
        body = data[:-_DIGEST]
        start = len(_MAGIC) + _HEAD.size
        if len(data) < start + _DIGEST or _digest(body) != data[-_DIGEST:]:
            raise DataError(f"A list of files ({len(data)} bytes) is damaged: its checksum differs. Use another copy.")
        count, length, origin, has_stamps = _HEAD.unpack(body[len(_MAGIC) : start])

        def take(kind: str, number: int) -> Numbers:
            nonlocal start
            values = np.frombuffer(body, dtype=kind, count=number, offset=start)
            start += values.nbytes
            return values.astype(np.int64)

        place = text_of(body[start : start + origin])
        start += origin
        ends, sizes = np.cumsum(take("<u4", count)), take("<i8", count)
        modified, tags = (take("<i8", count) if has_stamps else np.zeros(count, dtype=np.int64) for _ in range(2))
        return cls(place, body[start : start + length], ends, sizes, modified, tags)

    def stamped_like(self, other: Manifest) -> Manifest:
        """This manifest with the times and tags that another one has for files of the same name and size."""
        known = {(name, other.size(place)): place for place, name in enumerate(other.raws())}
        places = [known.get((name, self.size(place)), -1) for place, name in enumerate(self.raws())]
        found = np.array(places, dtype=np.int64)

        def of(values: Numbers) -> Numbers:
            return np.where(found >= 0, np.append(values, 0)[found], 0)

        return Manifest(other.origin, self.names, self.ends, self.sizes, of(other.modified), of(other.tags))


@dataclass(frozen=True, slots=True)
class Difference:
    """How a manifest differs from an earlier one.

    Args:
        added: Names that are new.
        removed: Names that are gone.
        resized: Names whose size is another one.
    """

    added: list[bytes]
    removed: list[bytes]
    resized: list[bytes]

    @classmethod
    def between(cls, now: Manifest, before: Manifest) -> Difference:
        """What happened from `before` to `now`; names in byte order."""
        new = dict(zip(now.raws(), now.sizes.tolist(), strict=True))
        old = dict(zip(before.raws(), before.sizes.tolist(), strict=True))
        return cls(
            [name for name in new if name not in old],
            [name for name in old if name not in new],
            [name for name, size in new.items() if old.get(name, size) != size],
        )

    def __str__(self) -> str:
        parts = [
            f"{len(names):,} {what} ({', '.join(repr(text_of(name)) for name in names[:3])}{', …' * (len(names) > 3)})"
            for what, names in (("added", self.added), ("removed", self.removed), ("changed in size", self.resized))
            if names
        ]
        return ", ".join(parts) or "nothing"


def text_of(name: bytes) -> str:
    """A name as text, whatever the locale; bytes that are no UTF-8 as surrogates."""
    return name.decode("utf-8", "surrogateescape")


def bytes_of(name: str) -> bytes:
    """The opposite of `text_of`."""
    return name.encode("utf-8", "surrogateescape")


def nanoseconds(seconds: float) -> int:
    """A time that a store told, in whole milliseconds: what a float has beyond that is noise."""
    return round(seconds * 1000) * 1_000_000


def tag_of(entity_tag: str | None) -> int:
    """A number for the entity tag of an object, never 0; 0 if there is no tag."""
    if not entity_tag:
        return 0
    digest = hashlib.blake2b(bytes_of(entity_tag.strip('"')), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
