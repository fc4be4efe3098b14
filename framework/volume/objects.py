"""A bucket of an object store, S3 and its like, as a volume.

Guarantee: an object is published by one request, a large one by completing its parts, so that readers see it whole or
not at all. Whatever is written is asked for afterwards: a store that answers success and has lost or cut the bytes is
noticed. Less than was asked for is never returned. Memory in transfers is bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from framework.volume.base import (
    Entry,
    Names,
    PartsFailed,
    Volume,
    VolumeDenied,
    VolumeError,
    VolumeMissing,
    check_range,
    guarded,
    too_short,
    wrong_sum,
)
from framework.volume.failures import Doubtful, insist
from framework.volume.library import Address, Library, library

T = TypeVar("T")

PART = 8 << 20  # bytes of a part that is sent or asked for at once
PARALLEL = 8  # parts under way
MAX_PARTS = 9_000  # S3 takes 10,000
_DELETE = 1_000  # names in one request


class ObjectVolume(Volume):
    """Objects of a bucket below a prefix. Making this object connects to nothing.

    Args:
        address: The store.
        url: How messages name the bucket, without prefix.
        prefix: Below which names are, without a slash at its ends; empty: the whole bucket.

    Raises:
        VolumeError: The prefix has a part that no name may have, or obstore is not installed.
    """

    def __init__(self, address: Address, url: str, prefix: str) -> None:
        self._address = address
        self._url = url
        self.place = f"{url.rstrip('/')}/{prefix}" if prefix else url
        self._prefix = self._checked(prefix, folder=True)
        library(self.place)

    def at(self, folder: str) -> Volume:
        name = self._checked(folder, folder=True)
        return type(self)(self._address, self._url, self._key(name) if name else self._prefix)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/")

    def _call(self, name: str, work: Callable[[Any, Any, int], T], *, repeatable: bool = True) -> T:
        """Lets `work(module, store, requests before)` run until it succeeds or must fail."""
        mine: Library = library(self.place)
        shown = self.shown(name)
        with self._explained():
            store = mine.store(self._address)
        return insist(
            shown,
            mine,
            self._address.retry_seconds,
            lambda tries: work(mine.module, store, tries),
            repeatable=repeatable,
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """The store is made when it is first used, of options that only obstore can judge."""
        try:
            yield
        except VolumeError:
            raise
        except Exception as error:
            text = str(error).split("\n\nDebug source", 1)[0].rstrip(".")
            raise VolumeError(
                f"{self.place} cannot be opened: {text}. Check the options and the environment."
            ) from None

    def list(self, folder: str = "") -> Iterator[Entry]:
        name = self._checked(folder, folder=True)
        return self._listed(name)

    def _listed(self, folder: str) -> Iterator[Entry]:
        mine = library(self.place)
        start = len(self._prefix) + 1 if self._prefix else 0
        stream = self._call(folder, lambda module, store, tries: module.list(store, self._key(folder) or None))
        with mine.holding(stream):
            while True:
                page = self._call(folder, lambda module, store, tries: next(stream, None), repeatable=False)
                if page is None:
                    return
                for found in page:
                    yield as_entry(found["path"][start:], found)

    def folders(self, folder: str = "") -> Names:
        prefix = self._key(self._checked(folder, folder=True)) or None
        found = self._call(folder, lambda module, store, tries: module.list_with_delimiter(store, prefix))
        return sorted(one.rstrip("/").rpartition("/")[2] for one in found["common_prefixes"])

    def size(self, name: str) -> int | None:
        key = self._key(self._checked(name))
        try:
            return int(self._call(name, lambda module, store, tries: module.head(store, key))["size"])
        except VolumeMissing:
            return None

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        self._checked(name)
        check_range(self.shown(name), offset, length)
        if not length:  # to the end: only asking for the size tells a whole answer from a cut one
            size = self.size(name)
            if size is None:
                raise VolumeMissing(f"{self.shown(name)} is not there.")
            if size < offset:
                raise too_short(self.shown(name), offset, length or 0, size - offset)
            length = 0 if length == 0 else size - offset
        if length <= PART:
            return bytes(self._part(name, offset, length)) if length else b""
        data = bytearray(length)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._checked(name)
        check_range(self.shown(name), offset, None)
        view = buffer.cast("B")

        def fill(start: int) -> None:
            piece = view[start : start + PART]
            piece[:] = memoryview(self._part(name, offset + start, len(piece)))

        starts = range(0, len(view), PART)
        if len(starts) <= 1:
            for start in starts:
                fill(start)
            return
        with ThreadPoolExecutor(min(PARALLEL, len(starts)), "volume-read") as pool:
            futures = [pool.submit(fill, start) for start in starts]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def piece(self, name: str, offset: int, length: int) -> tuple[bytes, Entry | None]:
        self._checked(name)
        check_range(self.shown(name), offset, length)
        return self._call(name, lambda module, store, tries: self._piece(module, store, name, offset, length))

    def _piece(self, module: Any, store: Any, name: str, offset: int, length: int) -> tuple[bytes, Entry | None]:
        answer = module.get(store, self._key(name), options={"range": (offset, offset + length)})
        return bytes(answer.bytes()), as_entry(name, answer.meta)

    def _part(self, name: str, offset: int, length: int) -> Any:
        """A part as an object that is a buffer of exactly so many bytes."""
        key = self._key(name)

        def get(module: Any, store: Any, tries: int) -> Any:
            data = module.get_range(store, key, start=offset, length=length)
            if len(data) != length:
                raise Doubtful(
                    f"{len(data)} of {length} bytes came from byte {offset} on; it was cut off, or is shorter"
                )
            return data

        try:
            return self._call(name, get)
        except (VolumeMissing, VolumeDenied):
            raise
        except VolumeError:
            size = self.size(name)  # a store says in its own words that a file ends before
            if size is not None and size < offset + length:
                raise too_short(self.shown(name), offset, length, max(0, size - offset)) from None
            raise

    def put(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        key = self._key(self._checked(name))
        content = bytes(data)
        mode = "create" if exclusive else "overwrite"

        def send(module: Any, store: Any, tries: int) -> None:
            try:
                result = module.put(store, key, content, mode=mode, use_multipart=False)
            except module.exceptions.AlreadyExistsError as error:
                was_retried = tries > 0 or "retries: 0," not in str(error)
                if was_retried and bytes(module.get(store, key).bytes()) == content:
                    return  # the answer to an earlier attempt was lost
                raise
            self._confirm(module, store, key, len(content), result)

        self._call(name, send)

    def upload(self, name: str, parts: Iterable[memoryview | bytes], size: int) -> None:
        key = self._key(self._checked(name))
        part = max(PART, -(-size // MAX_PARTS))
        shown = self.shown(name)

        def send(module: Any, store: Any, tries: int) -> None:
            pieces = _pieces(guarded(parts), size, part, shown)
            if size <= part:
                result = module.put(store, key, b"".join(pieces), use_multipart=False)
            else:
                how = {"use_multipart": True, "chunk_size": part, "max_concurrency": PARALLEL}
                result = module.put(store, key, pieces, **how)
            self._confirm(module, store, key, size, result, drop=True)

        try:
            self._call(name, send, repeatable=isinstance(parts, Sequence))
        except PartsFailed as failed:
            assert failed.__cause__ is not None
            raise failed.__cause__ from None

    def _confirm(self, module: Any, store: Any, key: str, size: int, result: Any, *, drop: bool = False) -> None:
        """Asks whether the store has what it said it took; what is there of it may be dropped, else is written anew."""
        try:
            found = module.head(store, key)
        except FileNotFoundError:
            raise Doubtful("the store answered success, and it is not there: the bytes were lost") from None
        sent, kept = result.get("e_tag"), found.get("e_tag")
        is_same = not sent or not kept or sent == kept
        if found["size"] != size:
            if drop and is_same and sent:
                module.delete(store, key)
            raise Doubtful(f"the store answered success, and has {found['size']} bytes of {size}: the rest was lost")
        if not is_same:
            raise Doubtful("the store answered success, and has other bytes: they were lost, or someone else writes it")

    def delete(self, name: str) -> None:
        self._delete(name, [self._key(self._checked(name))])

    def delete_folder(self, folder: str) -> None:
        keys: list[str] = []  # type: ignore[valid-type]
        for entry in self.list(folder):
            keys.append(self._key(entry.name))
            if len(keys) == _DELETE:
                self._delete(folder, keys)
                keys = []
        self._delete(folder, keys)

    def _delete(self, name: str, keys: Names) -> None:
        if keys:
            with contextlib.suppress(VolumeMissing):
                self._call(name, lambda module, store, tries: module.delete(store, keys))


def as_entry(name: str, found: Any) -> Entry:
    """The entry of a file from what a store told of it."""
    return Entry(name, found["size"], found["last_modified"].timestamp(), found["e_tag"])


def _pieces(parts: Iterable[memoryview | bytes], size: int, longest: int, shown: str) -> Iterator[memoryview]:
    """The parts cut into pieces that are no longer than allowed.

    Raises:
        VolumeError: They have another size in sum; the last piece is withheld until that is known.
    """
    sent = 0
    last: memoryview | None = None
    for part in parts:
        view = memoryview(part).cast("B")
        sent += len(view)
        if sent > size:
            raise wrong_sum(shown, size, sent)
        for start in range(0, len(view), longest):
            if last is not None:
                yield last
            last = view[start : start + longest]
    if sent != size:
        raise wrong_sum(shown, size, sent)
    if last is not None:
        yield last
