"""From a remote place into the local store: one whole checkpoint, or nothing.

Guarantee: what is published locally has the checksums of the remote manifest, is durable, and gets its `.metadata` last.
Files that are here already with the right bytes are not fetched again, those of an interrupted fetch neither. Nothing
that is here is changed before every missing byte has arrived.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from framework.checkpoint import files
from framework.checkpoint.commit import NO_RENAME, publish
from framework.checkpoint.files import PIECE_BYTES, DamagedError, FileRecord, num_pieces
from framework.checkpoint.manifest import METADATA
from framework.checkpoint.remote.listing import Copy
from framework.checkpoint.store import CheckpointStore
from framework.errors import CheckpointError
from framework.volume import Volume, VolumeMissing

log = logging.getLogger(__name__)

FETCH = ".fetch-"  # before the folder's name, while it is fetched
THREADS = 8
SPARE_BYTES = 64 << 20  # what a disk should have left afterwards


def fetch(
    volume: Volume,
    copy: Copy,
    store: CheckpointStore,
    *,
    is_thorough: bool = False,
    damaged: list[str] | None = None,
) -> int:
    """Makes the local store hold a remote checkpoint.

    Args:
        volume: The place of the run.
        copy: The checkpoint there.
        store: The local checkpoints.
        is_thorough: Whether the checksums of a copy that is here, whole by its sizes, are compared too.
        damaged: Gets what was wrong with each file of a published checkpoint that was here, when it was replaced.

    Returns:
        Bytes that were fetched.

    Raises:
        DamagedError: The remote copy is damaged; the message names the file.
        CheckpointError: It does not fit on the local disk, or the disk failed.
        VolumeError: It could not be read.
    """
    folder = store.folder(copy.step)
    is_here = _same(folder / METADATA, copy.metadata) and _same(folder / copy.manifest_name, copy.manifest_data)
    records = copy.manifest.files
    if is_here and not is_thorough and all(_has_size(folder / name, record) for name, record in records.items()):
        return 0
    staging = store.path / f"{FETCH}{folder.name}"
    try:
        wrong = _wrong_in(folder, records.items())
        missing = [(name, records[name]) for name in wrong]
        if is_here and not missing:
            return 0
        before = _damage(folder, copy, wrong, is_here=is_here)
        staging.mkdir(parents=True, exist_ok=True)
        absent = _wrong_in(staging, missing)
        left = [(name, record) for name, record in missing if name in absent]
        size = sum(record.size for _, record in left)
        _check_space(store.path, size, copy)
        began = time.monotonic()
        log.info("fetching %s of step %d from %s", files.words_of(size), copy.step, copy.place)
        _download(volume, folder.name, staging, left)
        _settle(copy, staging, folder, [name for name, _ in missing])
        if damaged is not None:
            damaged.extend(before)
        log.info("fetched step %d in %.2f s", copy.step, time.monotonic() - began)
        return size
    except OSError as error:
        raise CheckpointError(
            f"{copy.place} could not be fetched into {folder}: {error.strerror or error}. "
            f"Make room there, or choose another run.dir."
        ) from error


def clear(store: CheckpointStore) -> None:
    """Removes what interrupted fetches left."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(store.path):
            if entry.name.startswith(FETCH) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)


def _same(path: Path, data: bytes) -> bool:
    try:
        return files.read(path) == data
    except DamagedError:
        return False


def _has_size(path: Path, record: FileRecord) -> bool:
    try:
        files.check_size(path, record)
    except DamagedError:
        return False
    return True


def _damage(folder: Path, copy: Copy, wrong: Mapping[str, str], *, is_here: bool) -> list[str]:
    """What is wrong with a checkpoint that was published here; nothing if there is none, or it is another save."""
    if is_here:
        return list(wrong.values())
    if not os.path.lexists(folder / METADATA):
        return []
    if _same(folder / METADATA, copy.metadata):
        return [f"{copy.manifest_name} is missing or damaged", *wrong.values()]
    return [f"{METADATA} is damaged, or that of another save"]


def _wrong_in(folder: Path, wanted: Iterable[tuple[str, FileRecord]]) -> dict[str, str]:
    """Those files that a folder does not have with the right bytes, and why."""

    def problem_of(item: tuple[str, FileRecord]) -> str | None:
        name, record = item
        try:
            files.check_size(folder / name, record)
            for piece in range(num_pieces(record.size)):
                files.check_piece(folder / name, record, piece)
        except DamagedError as error:
            return str(error)
        return None

    items = list(wanted)
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        problems = zip(items, pool.map(problem_of, items), strict=True)
        return {name: problem for (name, _), problem in problems if problem is not None}


def _check_space(path: Path, size: int, copy: Copy) -> None:
    free = shutil.disk_usage(path).free
    if size and size + SPARE_BYTES > free:
        raise CheckpointError(
            f"{copy.place} does not fit on the disk of {path}: {files.words_of(size)} are to be fetched, and "
            f"{files.words_of(free)} are free. Make room there, or choose another run.dir."
        )


def _download(volume: Volume, folder: str, staging: Path, wanted: list[tuple[str, FileRecord]]) -> None:
    """Fetches files piece by piece, each compared with its checksum; durable in `staging` on return."""
    opened: dict[str, int] = {}

    def one(task: tuple[str, FileRecord, int]) -> None:
        name, record, number = task
        begin = number * PIECE_BYTES
        piece = memoryview(bytearray(min(PIECE_BYTES, record.size - begin)))
        for is_last in (False, True):
            _read(volume, f"{folder}/{name}", begin, piece)
            if files.crc32(piece) == record.crc32[number]:
                break
            if is_last:
                raise DamagedError(f"{volume.shown(f'{folder}/{name}')} is damaged from byte {begin:,} on (checksum)")
        done = 0
        while done < len(piece):
            done += os.pwrite(opened[name], piece[done:], begin + done)

    try:
        for name, record in wanted:
            opened[name] = _new(staging / name, record.size)
        tasks = [(name, record, number) for name, record in wanted for number in range(num_pieces(record.size))]
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for _ in pool.map(one, tasks):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for fd in opened.values():
            os.fsync(fd)
    finally:
        for fd in opened.values():
            os.close(fd)


def _read(volume: Volume, name: str, begin: int, piece: memoryview) -> None:
    try:
        volume.read_into(name, begin, piece)
    except VolumeMissing as error:
        raise DamagedError(f"{volume.shown(name)} is missing") from error


def _new(path: Path, size: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *NO_RENAME):  # some file systems cannot reserve
            os.close(fd)
            raise
    return fd


def _settle(copy: Copy, staging: Path, folder: Path, names: list[str]) -> None:
    """Moves what was fetched to where it belongs, and publishes it."""
    for name, data in ((copy.manifest_name, copy.manifest_data), (METADATA, copy.metadata)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staging / name)
        files.create(staging / name, data)
    files.sync_folder(staging)
    folder.mkdir(exist_ok=True)
    for name in (*names, copy.manifest_name):
        publish(staging / name, folder / name)
    files.sync_folder(folder)
    publish(staging / METADATA, folder / METADATA)
    for place in (folder, folder.parent):
        files.sync_folder(place)
    shutil.rmtree(staging, ignore_errors=True)
