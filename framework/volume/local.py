"""A folder, on a local disk or any mount, as a volume.

Guarantee: a file gets its name only when its bytes are on the disk, by a rename of a temporary file, or by a link if
it must be new; where the mount has neither, it is written directly, as one write, made anew where it must be. File and
folder are synced. A link at the end of a name is never followed: reading it is an error, writing replaces it, deleting
removes it. Deletion follows no link at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from framework.volume.base import (
    Entry,
    Names,
    PartsFailed,
    Volume,
    VolumeDenied,
    VolumeError,
    VolumeExists,
    VolumeMissing,
    check_range,
    guarded,
    too_short,
    wrong_sum,
)
from framework.volume.durable import sync_folder, write_all

PREFIX, SUFFIX = ".volume-", ".tmp"  # temporary files: neither listed nor ever read
_CANNOT = {errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV, errno.EMLINK}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_PIECE = 8 << 20
_ONE_WRITE = 64 << 20  # bytes of a file that is written at once where it is written directly
_RACES = 10  # how often another writer of the same name may come between
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalVolume(Volume):
    """A folder. Making this object touches nothing; the folder is made with the first file.

    Args:
        path: The folder.
        place: How messages name it; the path as given if left out.
    """

    path: Path

    def __init__(self, path: Path | str, place: str | None = None) -> None:
        self.place = place or str(path)
        self.path = Path(path).absolute()

    def at(self, folder: str) -> LocalVolume:
        name = self._checked(folder, folder=True)
        return LocalVolume(self.path / name, self.shown(name))

    def list(self, folder: str = "") -> Iterator[Entry]:
        name = self._checked(folder, folder=True)
        return self._walk(name)

    def _walk(self, folder: str) -> Iterator[Entry]:
        pending = [folder]
        while pending:
            name = pending.pop()
            for found in self._scan(name):
                inner = f"{name}/{found.name}" if name else found.name
                with self._errors(inner), contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if found.is_dir(follow_symlinks=False):
                        pending.append(inner)
                    elif found.is_file(follow_symlinks=False) and not is_temporary(found.name):
                        status = found.stat(follow_symlinks=False)
                        yield Entry(inner, status.st_size, status.st_mtime)

    def folders(self, folder: str = "") -> Names:
        name = self._checked(folder, folder=True)
        return sorted(found.name for found in self._scan(name) if found.is_dir(follow_symlinks=False))

    def _scan(self, folder: str) -> tuple[os.DirEntry[str], ...]:
        with self._errors(folder):
            if folder and (self.path / folder).is_symlink():
                return ()
            try:
                with os.scandir(self.path / folder) as found:
                    return tuple(found)
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def size(self, name: str) -> int | None:
        path = self.path / self._checked(name)
        with self._errors(name):
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self.path / self._checked(name)
        check_range(self.shown(name), offset, length)
        with self._errors(name), self._open(path, name) as fd:
            left = os.fstat(fd).st_size - offset
            wanted = max(left, 0) if length is None else length
            if left < wanted or left < 0:
                raise too_short(self.shown(name), offset, max(wanted, 1), max(left, 0))
            data = bytearray(wanted)
            self._fill(fd, name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path = self.path / self._checked(name)
        check_range(self.shown(name), offset, None)
        with self._errors(name), self._open(path, name) as fd:
            self._fill(fd, name, offset, buffer.cast("B"))

    @contextlib.contextmanager
    def _open(self, path: Path, name: str) -> Iterator[int]:
        fd = os.open(path, _READ)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise VolumeMissing(f"{self.shown(name)} is no regular file.")
            yield fd
        finally:
            os.close(fd)

    def _fill(self, fd: int, name: str, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done : done + _PIECE]], offset + done)
            if got == 0:
                raise too_short(self.shown(name), offset, len(view), done)
            done += got

    def put(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        path = self.path / self._checked(name)
        with self._errors(name):
            if exclusive and os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._publish(path, name, [data], len(data), exclusive)

    def upload(self, name: str, parts: Iterable[memoryview | bytes], size: int) -> None:
        path = self.path / self._checked(name)
        try:
            with self._errors(name):
                self._publish(path, name, guarded(parts), size, exclusive=False)
        except PartsFailed as failed:
            assert failed.__cause__ is not None
            raise failed.__cause__ from None

    def _publish(self, path: Path, name: str, parts: Iterable[memoryview | bytes], size: int, exclusive: bool) -> None:
        _make_folder(path.parent)
        temporary = path.with_name(f"{PREFIX}{uuid.uuid4().hex[:16]}{SUFFIX}")
        try:
            self._write(temporary, name, parts, size)
            try:
                if exclusive:
                    os.link(temporary, path, follow_symlinks=False)
                else:
                    os.replace(temporary, path)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._write_directly(temporary, path, name, size, exclusive)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        sync_folder(path.parent)

    def _write_directly(self, source: Path, path: Path, name: str, size: int, exclusive: bool) -> None:
        """For mounts that can neither rename nor link: a whole file from the temporary one."""
        for last in range(_RACES + 1):
            if not exclusive:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            with source.open("rb", buffering=0) as stream:
                whole = iter(lambda: stream.read(max(_PIECE, size if size < _ONE_WRITE else 0)), b"")
                try:
                    self._write(path, name, whole, size)
                    return
                except FileExistsError:
                    if exclusive or last == _RACES:
                        raise

    def _write(self, path: Path, name: str, parts: Iterable[memoryview | bytes], size: int) -> None:
        """A new file, synced; it is removed again if it could not be written."""
        fd = os.open(path, _NEW, 0o666)
        try:
            try:
                written = 0
                for part in parts:
                    written += memoryview(part).nbytes
                    if written > size:
                        break
                    write_all(fd, part)
                if written != size:
                    raise wrong_sum(self.shown(name), size, written)
                os.fsync(fd)
                if (kept := os.fstat(fd).st_size) != size:
                    raise VolumeError(f"{self.shown(name)}: the disk keeps {kept} bytes of {size} that it took.")
            finally:
                os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def delete(self, name: str) -> None:
        path = self.path / self._checked(name)
        with self._errors(name):
            if self._is_behind_link(name):
                return
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            except OSError:
                if path.is_dir() and not path.is_symlink():  # a folder is no file of that name
                    return
                raise
            sync_folder(path.parent)

    def delete_folder(self, folder: str) -> None:
        path = self.path / self._checked(folder, folder=True)
        with self._errors(folder):
            if self._is_behind_link(folder):
                return
            if path.is_symlink():
                path.unlink()
            elif path.is_dir():
                with contextlib.suppress(FileNotFoundError):  # another one deletes it as well
                    shutil.rmtree(path)
            else:
                return
            sync_folder(path.parent)

    def _is_behind_link(self, name: str) -> bool:
        """Whether a folder on the way to a name is a link: what lies behind it is not the volume's to delete."""
        folders = name.split("/")[:-1]
        return any((self.path / Path(*folders[:count])).is_symlink() for count in range(1, len(folders) + 1))

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _translated(error, self.shown(name)) from error


def is_temporary(name: str) -> bool:
    """Whether the last part of a name is that of a file which was not finished."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def _make_folder(path: Path) -> None:
    """The folder and those above it, their names made durable."""
    new = []
    while not path.is_dir():
        new.append(path)
        if path == path.parent:
            break
        path = path.parent
    for folder in reversed(new):
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise VolumeError(
                f"{folder} is no folder, and a file is to be written below it. Use another name."
            ) from None
        except OSError as error:
            kind = VolumeDenied if error.errno in _REFUSED else VolumeError
            reason = error.strerror or str(error)
            raise kind(f"the folder {folder} cannot be created: {reason}. Use another place.") from error
        sync_folder(folder.parent)


def _translated(error: OSError, shown: str) -> VolumeError:
    reason = error.strerror or str(error)
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return VolumeMissing(f"{shown} is not there: {reason}.")
        case errno.EEXIST:
            return VolumeExists(f"{shown} is there already.")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return VolumeDenied(f"{shown}: {reason}. Give this user access, or use another place.")
        case errno.ELOOP:
            return VolumeError(f"{shown} is a link, and links are not followed. Use the file it points to.")
        case errno.ENOSPC | errno.EDQUOT:
            return VolumeError(f"{shown}: {reason}. Free some space, or use another place.")
    return VolumeError(f"{shown}: {reason}.")
