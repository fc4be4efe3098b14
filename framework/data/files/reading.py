"""One file of a volume, whole and as it was listed, or an error that says what is wrong with it.

Guarantee: what is read has the size that the list has, and was not written since, where the volume tells; another
answer is asked for again a few times, then it is an error. What may pass (5xx, 429, timeouts, connections, EIO, ESTALE
and their like on a mount) is tried again with full jitter until the deadline. Errors name the file and the attempts.
Random numbers of the samples are not touched.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from framework.data.files.limiter import Limiter, Ticket, limiter_of
from framework.data.files.manifest import Manifest, nanoseconds, tag_of
from framework.data.files.pieces import side_by_side
from framework.errors import DataError
from framework.volume import Volume, VolumeDenied, VolumeError, VolumeMissing, open_volume

PIECE = 8 << 20  # bytes of one request
MAX_LIES = 3  # attempts to get a file as it was listed
NODE_REQUESTS = 512  # under way from one machine, by all its processes
TIMEOUT = "60s"  # of one request to an object store

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
_TRANSIENT = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE,
    errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EPROTO,
}  # fmt: skip


class Watch:
    """What is known of the reading of a file while it goes on.

    Attributes:
        moved: When it last got on, on the monotonic clock.
        attempts: How many requests were begun for the piece that is read now.
        retries: How many requests were made again, for all pieces.
        seconds: How long the last request that went well took.
        cause: What the last request that failed said.
        is_abandoned: Nobody waits for it any more.
        ticket: The request that is under way.
    """

    __slots__ = ("attempts", "cause", "is_abandoned", "moved", "retries", "seconds", "ticket")

    def __init__(self) -> None:
        self.moved = time.monotonic()
        self.attempts = self.retries = 0
        self.seconds: float | None = None
        self.cause = ""
        self.is_abandoned = False
        self.ticket: Ticket | None = None


class Abandoned(Exception):
    """Nobody waits for this file any more."""


class Piece(NamedTuple):
    """A part of a file as one request brought it."""

    data: bytes
    size: int | None
    modified: int = 0  # nanoseconds; 0: not known, as in the manifest
    tag: int = 0


class Failed(Exception):
    """One request failed.

    Args:
        cause: Why.
        may_pass: Whether the same request may succeed later.
        is_busy: Whether the store asked for fewer requests.
        advice: What to do.
    """

    def __init__(self, cause: str, *, may_pass: bool = True, is_busy: bool = False, advice: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.may_pass = may_pass
        self.is_busy = is_busy
        self.advice = advice


class Reader:
    """Reads the files of a volume in this process. Thread-safe.

    Args:
        place: A path or URL.
        files: Its list.
        options: Settings of an object store.
        deadline_seconds: How long a piece of a file is tried again.

    Raises:
        VolumeError: The place is none.
    """

    def __init__(
        self,
        place: str | Path,
        files: Manifest,
        options: Mapping[str, str] | None = None,
        deadline_seconds: float = 300.0,
    ) -> None:
        settings = {"timeout": TIMEOUT, **(options or {})} if "://" in str(place) else dict(options or {})
        self.volume = open_volume(place, retry_seconds=0.0, options=settings)
        self.files = files
        self.deadline_seconds = deadline_seconds
        self.limiter: Limiter = limiter_of(_store_of(self.volume), NODE_REQUESTS)
        self._tolerance = 0 if self.volume.path is not None else 10**9  # headers tell seconds, lists more
        folder = self.volume.path
        self._request: Callable[[str, int, int], Piece] = (
            _MountedFiles(os.fsencode(folder)) if folder is not None else _VolumeFiles(self.volume)
        )

    def whole(self, index: int, watch: Watch) -> bytes:
        """The bytes of a file.

        Raises:
            DataError: It could not be read, or is not as it was listed.
            Abandoned: Nobody waits for it any more.
        """
        size = self.files.size(index)
        if size <= PIECE:
            return self._piece(index, 0, size, watch)
        return b"".join(self.pieces(index, watch))

    def pieces(self, index: int, watch: Watch) -> Iterator[bytes]:
        """The bytes of a file in pieces of at most `PIECE` bytes; raises as `whole` does."""
        size = self.files.size(index)
        ranges = [(offset, min(PIECE, size - offset)) for offset in range(0, size, PIECE)]
        if self.volume.path is not None or len(ranges) < 2:  # what mounts a volume reads ahead itself
            return (self._piece(index, *each, watch) for each in ranges)
        return side_by_side((partial(self._piece, index, *each) for each in ranges), watch, Abandoned)

    def part(self, index: int, offset: int, length: int, watch: Watch) -> bytes:
        """Some bytes of a file, at most `PIECE`; raises as `whole` does."""
        return self._piece(index, offset, length, watch)

    def local_path(self, index: int) -> str | None:
        """Where a file of a mounted volume is; none if it is not there as it was listed."""
        folder = self.volume.path
        if folder is None:
            return None
        path = os.path.join(folder, self.files.name(index))
        try:
            found = os.stat(path)
        except OSError:
            return None
        piece = Piece(b"", found.st_size, found.st_mtime_ns)
        return path if self._difference(index, piece, 0) is None else None

    def shown(self, index: int) -> str:
        """The path or URL of a file, for messages."""
        name = self.files.name(index).encode(errors="surrogateescape").decode(errors="backslashreplace")
        return self.volume.shown(name)

    def _piece(self, index: int, offset: int, length: int, watch: Watch) -> bytes:
        name = self.files.name(index)
        began = watch.moved = time.monotonic()
        watch.attempts = lies = failures = 0
        while True:
            left = began + self.deadline_seconds - time.monotonic()
            ticket = watch.ticket = self.limiter.enter(max(left, 0.0))
            if ticket is None:
                raise self._given_up(index, watch, began, Failed("the store asks for fewer requests"))
            watch.attempts += 1
            failure: Failed | None = None
            try:
                piece = self._request(name, offset, length)
            except Failed as error:
                failure = error
            finally:
                self.limiter.leave(ticket, is_good=failure is None, is_busy=failure is not None and failure.is_busy)
            if watch.is_abandoned:
                raise Abandoned
            now = watch.moved = time.monotonic()
            if failure is None:
                difference = self._difference(index, piece, length)
                if difference is None:
                    watch.seconds = now - ticket.began
                    return piece.data
                lies += 1
                failure = Failed(difference, may_pass=lies < MAX_LIES, advice=_LISTED)
            failures += 1
            watch.cause = failure.cause
            left = began + self.deadline_seconds - now
            if not failure.may_pass or left <= 0:
                raise self._given_up(index, watch, began, failure)
            watch.retries += 1
            self.limiter.pause(failures, left, is_busy=failure.is_busy)

    def _difference(self, index: int, piece: Piece, length: int) -> str | None:
        """What is not as it was listed; none if all is."""
        size = self.files.size(index)
        if piece.size is not None and piece.size != size:
            return f"it has {piece.size} bytes, and had {size} when it was listed"
        if len(piece.data) != length:
            return f"{len(piece.data)} bytes came of {length}, though it has {size} bytes as listed"
        tag, modified = int(self.files.tags[index]), int(self.files.modified[index])
        if tag and piece.tag:
            return (
                None if tag == piece.tag else f"it has other content than when it was listed{_since(piece, modified)}"
            )
        if not modified or not piece.modified or abs(piece.modified - modified) <= self._tolerance:
            return None
        return f"it was written since it was listed{_since(piece, modified)}"

    def _given_up(self, index: int, watch: Watch, began: float, failure: Failed) -> DataError:
        attempts = f"{watch.attempts} attempt{'s' * (watch.attempts != 1)}"
        seconds = time.monotonic() - began
        return DataError(
            f"{self.shown(index)} could not be read ({attempts} in {seconds:.1f} s): {failure.cause}. "
            f"{failure.advice or _GENERAL}"
        )

    def stuck(self, index: int, watch: Watch) -> DataError:
        """Gives up a request that has no end. Returns the error to raise."""
        watch.is_abandoned = True
        if watch.ticket is not None:
            self.limiter.leave(watch.ticket)
        seconds = time.monotonic() - watch.moved
        before = f" Before, it failed: {watch.cause}." if watch.cause else ""
        return DataError(
            f"{self.shown(index)} could not be read: attempt {max(watch.attempts, 1)} has had no answer for "
            f"{seconds:.0f} s.{before} Look whether the volume still answers; the request is left alone."
        )


_GENERAL = "Look whether the volume is there and whole; loader.on_error=skip goes on without such files."
_ANEW = (
    "Bring back what was listed; loader.on_error=skip goes on without such files. The next start lists the files anew, "
    "unless manifest=frozen; a resume over other names or sizes needs run.allow=[data] too."
)
_LISTED = f"It was cut off, or changed since. {_ANEW}"


class _MountedFiles:
    """Requests to a folder, on a mount or a disk. Links are followed: the list was made by whoever follows them.

    Args:
        folder: Absolute.
    """

    def __init__(self, folder: bytes) -> None:
        self._prefix = folder.rstrip(b"/") + b"/"

    def __call__(self, name: str, offset: int, length: int) -> Piece:
        try:
            fd = os.open(self._prefix + os.fsencode(name), _READ)
            try:
                found = os.fstat(fd)
                data = os.pread(fd, length, offset)
                while len(data) < length:
                    more = os.pread(fd, length - len(data), offset + len(data))
                    if not more:
                        break
                    data += more
            finally:
                os.close(fd)
        except OSError as error:
            raise _understood(error) from error
        return Piece(data, found.st_size, found.st_mtime_ns)


class _VolumeFiles:
    """Requests to an object store, a web server, or the memory of the process.

    Args:
        volume: The volume, which makes each request once.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    def __call__(self, name: str, offset: int, length: int) -> Piece:
        try:
            data, entry = self._volume.piece(name, offset, length)
        except VolumeMissing as error:
            raise Failed(f"{error}", may_pass=False, advice=_LISTED) from error
        except VolumeDenied as error:
            raise Failed(f"{error}", may_pass=False) from error
        except VolumeError as error:
            raise Failed(f"{error}", may_pass=error.may_pass, is_busy=error.is_busy) from error
        if entry is None:
            return Piece(data, None)
        return Piece(data, entry.size, nanoseconds(entry.modified), tag_of(entry.tag))


def _understood(error: OSError) -> Failed:
    reason = error.strerror or str(error)
    if error.errno in _TRANSIENT:
        return Failed(reason)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Failed(
            f"{reason}, though it was listed",
            may_pass=False,
            advice=f"It was deleted, or the volume is no longer mounted there. {_ANEW}",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Failed(reason, may_pass=False, advice="Give this user access to it.")
    return Failed(reason, may_pass=False)


def _store_of(volume: Volume) -> str:
    """What answers requests: the host of a URL, or the folder."""
    if volume.path is not None:
        return str(volume.path)
    parts = urlsplit(volume.place)
    return f"{parts.scheme}://{parts.netloc}"


def _since(piece: Piece, modified: int) -> str:
    if not modified or not piece.modified:
        return ""
    return f" (last written at {_time(piece.modified)}, then at {_time(modified)})"


def _time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{rest:09d} UTC"
