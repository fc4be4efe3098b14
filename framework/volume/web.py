"""Files of a web server as a volume that is only read.

Guarantee: nothing is ever sent to the server but requests to read. A server that cannot give ranges is read whole; one
that cannot list (most cannot) says so in an error, never by an empty list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from framework.volume.base import (
    Entry,
    Names,
    VolumeDenied,
    VolumeError,
    VolumeMissing,
    check_range,
    too_short,
)
from framework.volume.failures import Doubtful
from framework.volume.library import library
from framework.volume.objects import ObjectVolume, as_entry

PIECE = 1 << 20


class WebVolume(ObjectVolume):
    """Files below a URL of a web server."""

    _gives_ranges: bool | None = None  # none: not known yet

    def list(self, folder: str = "") -> Iterator[Entry]:
        self._checked(folder, folder=True)
        with self._no_listing():
            return iter(tuple(self._impatient()._listed(folder)))

    def folders(self, folder: str = "") -> Names:
        with self._no_listing():
            return ObjectVolume.folders(self._impatient(), folder)

    def _impatient(self) -> ObjectVolume:
        """The same without a second try: 501 is a plain no here."""
        return ObjectVolume(replace(self._address, retry_seconds=0.0), self._url, self._prefix)

    @contextlib.contextmanager
    def _no_listing(self) -> Iterator[None]:
        try:
            yield
        except VolumeDenied:
            raise
        except VolumeError as error:
            raise VolumeError(
                f"{self.place} cannot be listed: a web server lists files only if it speaks WebDAV, and this one does "
                f"not ({error}). Name the files, or use the object store behind it (s3://, gs://, az://)."
            ) from None

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._checked(name)
        if self._gives_ranges is None and len(buffer):
            self._gives_ranges = self._ask_for_range(name)
        if self._gives_ranges or not len(buffer):
            super().read_into(name, offset, buffer)
        else:
            check_range(self.shown(name), offset, None)
            self._read_on(name, offset, buffer.cast("B"))

    def _piece(self, module: Any, store: Any, name: str, offset: int, length: int) -> tuple[bytes, Entry | None]:
        if self._gives_ranges is not False:
            try:
                return super()._piece(module, store, name, offset, length)
            except (module.exceptions.NotSupportedError, NotImplementedError):
                self._gives_ranges = False
        answer = module.get(store, self._key(name))
        return bytes(answer.bytes())[offset : offset + length], as_entry(name, answer.meta)

    def _part(self, name: str, offset: int, length: int) -> Any:
        if self._gives_ranges:
            return super()._part(name, offset, length)
        data = bytearray(length)
        self.read_into(name, offset, memoryview(data))
        return data

    def _ask_for_range(self, name: str) -> bool:
        key = self._key(name)

        def ask(module: Any, store: Any, tries: int) -> bool:
            try:
                module.get_range(store, key, start=0, length=1)
            except (module.exceptions.NotSupportedError, NotImplementedError):
                return False
            return True

        try:
            return self._call(name, ask)
        except VolumeMissing:
            raise
        except VolumeError:
            return True  # an empty file has no such range

    def _read_on(self, name: str, offset: int, view: memoryview) -> None:
        """Reads a file from its beginning, and keeps what was asked for."""
        key = self._key(name)
        mine = library(self.place)

        def get(module: Any, store: Any, tries: int) -> None:
            at = done = 0
            with mine.holding(module.get(store, key).stream(PIECE)) as stream:
                for chunk in stream:
                    piece = memoryview(chunk)[max(0, offset - at) :][: len(view) - done]
                    view[done : done + len(piece)] = piece
                    done += len(piece)
                    at += len(chunk)
                    if done == len(view):
                        return
            size = int(module.head(store, key)["size"])
            if size < offset + len(view):
                raise too_short(self.shown(name), offset, len(view), max(0, size - offset))
            raise Doubtful(f"{done} of {len(view)} bytes came from byte {offset} on; the answer was cut off")

        self._call(name, get)

    def put(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        self._refuse(name)

    def upload(self, name: str, parts: Iterable[memoryview | bytes], size: int) -> None:
        self._refuse(name)

    def delete(self, name: str) -> None:
        self._refuse(name)

    def delete_folder(self, folder: str) -> None:
        self._refuse(folder)

    def _refuse(self, name: str) -> NoReturn:
        raise VolumeError(f"{self.shown(name)} cannot be changed: a web server is read only. Use a folder or a bucket.")
