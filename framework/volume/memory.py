"""Files in the memory of this process, for tests and trials.

Guarantee: all volumes of one process with the same URL see the same files; another process, a forked child too, has
its own. A file is one object that is never changed, so that readers see whole files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from framework.volume.base import (
    Entry,
    Names,
    Volume,
    VolumeExists,
    VolumeMissing,
    check_range,
    too_short,
    wrong_sum,
)

_SCHEME = "memory://"
_files: dict[str, tuple[bytes, float]] = {}  # content and time; each use is one step of the interpreter: no lock


class MemoryVolume(Volume):
    """Files of this process below one URL.

    Args:
        url: `memory://` and any name.

    Raises:
        VolumeError: The name has a part that no name may have.
    """

    def __init__(self, url: str) -> None:
        self.place = url
        base = url[len(_SCHEME) :].strip("/")
        self._base = f"{base}/" if self._checked(base, folder=True) else ""

    def at(self, folder: str) -> MemoryVolume:
        name = self._checked(folder, folder=True)
        return MemoryVolume(_SCHEME + self._base + name) if name else self

    def list(self, folder: str = "") -> Iterator[Entry]:
        name = self._checked(folder, folder=True)
        return iter(self._below(name))

    def _below(self, folder: str) -> tuple[Entry, ...]:
        start = self._base + (f"{folder}/" if folder else "")
        return tuple(
            Entry(key[len(self._base) :], len(data), modified)
            for key, (data, modified) in _files.copy().items()
            if key.startswith(start)
        )

    def folders(self, folder: str = "") -> Names:
        name = self._checked(folder, folder=True)
        depth = name.count("/") + 1 if name else 0
        parts = (entry.name.split("/") for entry in self._below(name))
        return sorted({inner[depth] for inner in parts if len(inner) > depth + 1})

    def size(self, name: str) -> int | None:
        found = _files.get(self._base + self._checked(name))
        return None if found is None else len(found[0])

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        found = _files.get(self._base + self._checked(name))
        check_range(self.shown(name), offset, length)
        if found is None:
            raise VolumeMissing(f"{self.shown(name)} is not there.")
        left = len(found[0]) - offset
        wanted = max(left, 0) if length is None else length
        if left < wanted or left < 0:
            raise too_short(self.shown(name), offset, wanted, max(left, 0))
        return found[0][offset : offset + wanted]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        view[:] = self.read(name, offset, len(view))

    def piece(self, name: str, offset: int, length: int) -> tuple[bytes, Entry | None]:
        check_range(self.shown(name), offset, length)
        found = _files.get(self._base + self._checked(name))
        if found is None:
            raise VolumeMissing(f"{self.shown(name)} is not there.")
        return found[0][offset : offset + length], Entry(name, len(found[0]), found[1])

    def put(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        key, value = self._base + self._checked(name), (bytes(data), time.time())
        if not exclusive:
            _files[key] = value
        elif _files.setdefault(key, value) is not value:
            raise VolumeExists(f"{self.shown(name)} is there already.")

    def upload(self, name: str, parts: Iterable[memoryview | bytes], size: int) -> None:
        self._checked(name)
        data = bytearray()
        for part in parts:
            data += memoryview(part).cast("B")
            if len(data) > size:
                break
        if len(data) != size:
            raise wrong_sum(self.shown(name), size, len(data))
        self.put(name, bytes(data))

    def delete(self, name: str) -> None:
        _files.pop(self._base + self._checked(name), None)

    def delete_folder(self, folder: str) -> None:
        name = self._checked(folder, folder=True)
        for entry in self._below(name):
            _files.pop(self._base + entry.name, None)
