"""Files of a web server as a volume that is only read.

Guarantee: nothing is ever sent to the server but requests to read. A server that cannot give ranges is read whole; one
that cannot list (most cannot) says so in an error, never by an empty list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from framework.volume.base import Entry, Names, VolumeDenied, VolumeError
from framework.volume.failures import Doubtful
from framework.volume.objects import ObjectVolume


class WebVolume(ObjectVolume):
    """Files below a URL of a web server."""

    def list(self, folder: str = "") -> Iterator[Entry]:
        self._checked(folder, folder=True)
        try:
            return iter(tuple(super().list(folder)))
        except VolumeDenied:
            raise
        except VolumeError as error:
            raise self._no_listing(error) from error

    def folders(self, folder: str = "") -> Names:
        try:
            return super().folders(folder)
        except VolumeDenied:
            raise
        except VolumeError as error:
            raise self._no_listing(error) from error

    def _no_listing(self, error: VolumeError) -> VolumeError:
        return VolumeError(
            f"{self.place} cannot be listed: a web server lists files only if it speaks WebDAV, and this one does not "
            f"({error}). Name the files, or use the object store behind it (s3://, gs://, az://)."
        )

    def _part(self, name: str, offset: int, length: int) -> Any:
        if not self._gives_ranges(name):
            return self._whole(name, offset, length)
        return super()._part(name, offset, length)

    def _gives_ranges(self, name: str) -> bool:
        key = self._key(name)

        def ask(module: Any, store: Any, tries: int) -> bool:
            try:
                module.get_range(store, key, start=0, length=1)
            except (module.exceptions.NotSupportedError, NotImplementedError):
                return False
            return True

        return self._call(name, ask)

    def _whole(self, name: str, offset: int, length: int) -> Any:
        key = self._key(name)

        def get(module: Any, store: Any, tries: int) -> Any:
            data = memoryview(module.get(store, key).bytes())[offset : offset + length]
            if len(data) != length:
                raise Doubtful(
                    f"{len(data)} of {length} bytes came from byte {offset} on; it was cut off, or is shorter"
                )
            return data

        return self._call(name, get)

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
