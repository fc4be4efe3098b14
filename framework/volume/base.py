"""What a volume is: files by name below one place, whatever keeps them.

Guarantee: a name stays below its volume: one that is absolute, empty, has a NUL, or a part that is empty, `.` or `..`
is refused by every kind of volume before anything is touched. A file that is written is seen whole or not at all, and
a read gives exactly the bytes that were asked for or an error. Errors name the path or URL and say what to do.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from framework.errors import FrameworkError

Names: TypeAlias = list[str]  # inside a class that has a method of that name


class VolumeError(FrameworkError):
    """A file of a volume cannot be read or written; the message names its path or URL.

    Attributes:
        may_pass: Whether the same request may succeed later.
        is_busy: Whether the store asked for fewer requests (429, 503).
    """

    may_pass = False
    is_busy = False


class VolumeMissing(VolumeError):
    """There is no such file."""


class VolumeExists(VolumeError):
    """A file was to be made anew, and is there already."""


class VolumeUnsupported(VolumeError):
    """The store has no such operation: some know no put that is refused where the file is there already."""


class VolumeDenied(VolumeError):
    """Access is refused: permissions, or credentials that are wrong or have expired."""


class PartsFailed(Exception):
    """The parts of an upload raised something, which is the cause: no failure of the volume."""


def guarded(parts: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """The parts; what they raise is told from what the volume does.

    Raises:
        PartsFailed: They raised something.
    """
    try:
        yield from parts
    except Exception as error:
        raise PartsFailed from error


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a volume.

    Args:
        name: Its name relative to the volume, parts separated by `/`.
        size: Bytes.
        modified: When it was last written, in seconds since the epoch.
        tag: What an object store calls this content of it; none elsewhere.
    """

    name: str
    size: int
    modified: float
    tag: str | None = None


class Volume(ABC):
    """Files by name below one place. Made by `open_volume`; safe to use from several threads and in forked processes.

    Names are relative and separated by `/`. Every method raises `VolumeError` for a name that is not, `VolumeDenied`
    where access is refused, and `VolumeError` for what else goes wrong.

    Attributes:
        place: The path or URL, as shown in messages.
        path: The local folder, absolute; none for object stores.
    """

    place: str
    path: Path | None = None

    @abstractmethod
    def list(self, folder: str = "") -> Iterator[Entry]:
        """Every file below a folder, at any depth, in no promised order; a missing folder lists nothing.

        Names are relative to the volume, not to the folder. Links and files that are not regular are left out.
        """

    @abstractmethod
    def folders(self, folder: str = "") -> Names:
        """Names of the direct subfolders of a folder, sorted; only the last part of each."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; none if it is not there."""

    @abstractmethod
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """A part of a file.

        Args:
            name: The file.
            offset: First byte.
            length: Number of bytes; none: all from there on.

        Raises:
            VolumeMissing: It is not there.
            VolumeError: It is shorter than asked for.
        """

    @abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes from `offset` on; long ranges are read in parallel from object stores.

        Args:
            name: The file.
            offset: First byte.
            buffer: A writable, contiguous view; all of it is filled. After an error its content is not defined.

        Raises:
            VolumeMissing: It is not there.
            VolumeError: It is shorter than asked for.
        """

    def piece(self, name: str, offset: int, length: int) -> tuple[bytes, Entry | None]:
        """A part of a file, and what the same answer says of the whole file; none where it says nothing.

        The part may be shorter than asked for; whoever asks compares it with what the file should be.

        Raises:
            VolumeMissing: The file is not there.
        """
        return self.read(name, offset, length), None

    @abstractmethod
    def put(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        """Publishes a small file: readers see all of it, or what was there before.

        Args:
            name: The file; its folders are made.
            data: All it holds.
            exclusive: Refuse if it is there.

        Raises:
            VolumeExists: It is there, and `exclusive` was asked for.
        """

    @abstractmethod
    def upload(self, name: str, parts: Iterable[memoryview | bytes], size: int) -> None:
        """Writes a large file, visible only when it is whole; one of that name is replaced.

        Args:
            name: The file; its folders are made.
            parts: Its bytes in order, in pieces of any length. A piece must not change before this returns.
            size: Bytes of all parts together.

        Raises:
            VolumeError: The parts have another size in sum, or what arrived has; nothing is visible then.
            Exception: What `parts` raised, as it is; nothing is visible then either.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Removes a file; one that is not there is fine. A link is removed, not what it points to."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Removes a folder and everything below; links are removed, never followed; a missing one is fine."""

    @abstractmethod
    def at(self, folder: str) -> Volume:
        """The same volume below a folder, which need not exist."""

    def probe(self) -> None:
        """Writes a small file, reads it back and deletes it.

        Raises:
            VolumeError: One of it did not work; the message says which.
        """
        name, data = f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
        doing = "written to"
        try:
            self.put(name, data)
            doing = "read"
            back = self.read(name)
            doing = "deleted from"
            self.delete(name)
        except VolumeError as error:
            if doing == "read":
                with contextlib.suppress(VolumeError):
                    self.delete(name)
            raise type(error)(f"{self.place} cannot be {doing}: {error}") from error
        if back != data:
            raise VolumeError(
                f"{self.place} gave back other bytes ({len(back)}) than were written ({len(data)}): "
                f"nothing that is kept there can be trusted. Use another place."
            )

    def shown(self, name: str) -> str:
        """The path or URL of a file or folder, for messages."""
        return f"{self.place.rstrip('/')}/{name}" if name else self.place

    def _checked(self, name: str, *, folder: bool = False) -> str:
        """The name, if it stays below the volume; the empty one is the volume itself, which is a folder."""
        if folder and name == "":
            return name
        problem = _problem(name)
        if problem:
            raise VolumeError(f"{name!r} is no name of a file in {self.place}: it {problem}. Use a relative name.")
        return name


def _problem(name: str) -> str | None:
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not a str"
    if not name:
        return "is empty"
    if "\0" in name:
        return "has a NUL"
    if name.startswith("/"):
        return "is absolute"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is no valid Unicode"
    return None


def check_range(shown: str, offset: int, length: int | None) -> None:
    """Raises:
    VolumeError: A part of a file was asked for that no file can have."""
    if offset < 0 or (length is not None and length < 0):
        raise VolumeError(f"{shown}: no file has a part of {length} bytes from byte {offset} on.")


def too_short(shown: str, offset: int, wanted: int, got: int) -> VolumeError:
    """The error for a file that ends before the part that was asked for does."""
    return VolumeError(
        f"{shown} ends early: {got} of {wanted} bytes came from byte {offset} on. "
        f"It was cut off, or changed meanwhile; use another copy."
    )


def wrong_sum(shown: str, size: int, got: int) -> VolumeError:
    """The error for parts that have another size in sum than was announced."""
    return VolumeError(f"{shown} was not written: its parts have {got} bytes or more, not {size} as announced.")
