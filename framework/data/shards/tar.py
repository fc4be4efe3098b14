"""Samples of a tar file: the files of one name before its first dot, one after the other (the layout of webdataset).

Guarantee: headers are checked by their checksums, and a file that is cut off is noticed, wherever. Contents are handed out as
bytes; nothing of them is interpreted or run.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from framework.data.shards.base import Bytes, Damage, Samples

BLOCK = 512
LONGEST = 1 << 20  # bytes of a long name or of extended headers

_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
_REGULAR, _NO_CONTENT = b"07\0", b"123456"
_ZEROS = bytes(BLOCK)
_GZIP = b"\x1f\x8b"


class Member(NamedTuple):
    """A file in a tar file that belongs to a sample."""

    header: int
    key: str
    part: str
    start: int
    size: int


class TarSamples(Samples):
    """See the module. A sample is a dict: `__key__`, and the content of each of its files by what follows the key."""

    def __init__(self, source: Bytes) -> None:
        super().__init__(source)
        self._held: Member | None = None
        self._restart()

    def count(self) -> int:
        self._restart()
        while self._pass():
            pass
        return self._number

    def take(self, index: int) -> Any:
        if index < self._number:
            self._restart()
        while self._number < index:
            if not self._pass():
                break
        first = self._next()
        if first is None:
            raise Damage(self._offset, f"it ends after {self._number} samples, and sample {index} was expected")
        sample: dict[str, Any] = {"__key__": first.key}
        member: Member | None = first
        while member is not None and member.key == first.key:
            if member.part in sample:
                raise Damage(member.header, f"a second '{member.part}' of the sample '{first.key}'")
            sample[member.part] = self.source.read(member.start, member.size)
            self._held = None
            member = self._next()
        self._number += 1
        return sample

    def is_end(self, count: int) -> bool:
        while self._number < count and self._pass():
            pass
        return self._number == count and self._next() is None

    def _restart(self) -> None:
        self._offset = 0  # of the next header
        self._number = 0  # of the sample that begins there, or with the member that is held
        self._held = None

    def _pass(self) -> bool:
        """Passes over a sample; false if there is none."""
        first = self._next()
        if first is None:
            return False
        member: Member | None = first
        while member is not None and member.key == first.key:
            self._held = None
            member = self._next()
        self._number += 1
        return True

    def _next(self) -> Member | None:
        """The next member, which stays the next until it is let go; none at the end."""
        while self._held is None:
            found = self._file()
            if found is None:
                return None
            header, name, start, size = found
            match = _NAME.fullmatch(name)
            is_note = name.startswith("__") and name.endswith("__")
            if match is not None and not is_note:
                self._held = Member(header, match[1], match[2].lower(), start, size)
        return self._held

    def _file(self) -> tuple[int, str, int, int] | None:
        """Offset of the header, name, offset and size of the next regular file."""
        name: str | None = None
        size: int | None = None
        while True:
            header = self._offset
            block = self.source.read(header, BLOCK)
            if block == _ZEROS:
                return None
            if header == 0 and block.startswith(_GZIP):
                raise Damage(0, "it is compressed: unpack it")
            if not block:
                raise Damage(header, "it ends without the mark of its end, so that more may be missing")
            if len(block) < BLOCK:
                raise Damage(header, f"it ends within a header ({len(block)} of {BLOCK} bytes)")
            _check(header, block)
            kind, start = block[156:157], header + BLOCK
            length = 0 if kind in _NO_CONTENT else _number(header, block[124:136])
            is_content = kind in _REGULAR
            if is_content and size is not None:
                length = size
            if start + length > self.source.size:
                raise Damage(
                    header,
                    f"it ends at byte {self.source.size:,}, within a file of {length:,} bytes ({_name(block)!r})",
                )
            self._offset = start + -(-length // BLOCK) * BLOCK
            if is_content:
                return header, name if name is not None else _name(block), start, length
            if kind in b"Lx":
                extra = self._extra(header, start, length)
                if kind == b"L":
                    name = _text(extra.partition(b"\0")[0])
                else:
                    fields = _extended(header, extra)
                    name = _text(fields[b"path"]) if b"path" in fields else name
                    size = _number(header, fields[b"size"], 10) if b"size" in fields else size
            elif kind in b"Kg":
                continue
            elif kind in _NO_CONTENT:
                name = size = None
            else:
                raise Damage(header, f"{_name(block)!r} is of the kind {kind!r}, which is no plain file: unpack it")

    def _extra(self, header: int, start: int, length: int) -> bytes:
        if length > LONGEST:
            raise Damage(header, f"a name of {length:,} bytes")
        return self.source.read(start, length)


def _check(header: int, block: bytes) -> None:
    try:
        told = int(block[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        told = -1
    if sum(block) - sum(block[148:156]) + 8 * 32 != told:
        raise Damage(header, f"no tar header: it begins with {block[:8]!r}")


def _number(header: int, digits: bytes, base: int = 8) -> int:
    if base == 8 and digits[0] & 0x80:  # GNU: too large for octal digits
        return int.from_bytes(digits[1:], "big")
    try:
        return int(digits.strip(b" \0") or b"0", base)
    except ValueError:
        raise Damage(header, f"a size that is no number: {digits!r}") from None


def _name(block: bytes) -> str:
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _extended(header: int, data: bytes) -> dict[bytes, bytes]:
    """Fields of an extended header (pax): `length key=value` and a line end, each."""
    fields: dict[bytes, bytes] = {}
    place = 0
    while place < len(data) and data[place]:
        space = data.find(b" ", place, place + 20)
        length = int(data[place:space]) if space > 0 and data[place:space].isdigit() else 0
        key, equals, value = data[space + 1 : place + length - 1].partition(b"=")
        if length <= 0 or not equals:
            raise Damage(header, "an extended header that cannot be read")
        fields[key] = value
        place += length
    return fields
