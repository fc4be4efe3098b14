"""A checkpoint from one place to another, with `.metadata` last.

Guarantee: as the command `copy` says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from framework.checkpoint import files
from framework.checkpoint.commands.opened import Opened
from framework.checkpoint.commands.places import is_run, is_url
from framework.checkpoint.dcp.parallel import each
from framework.checkpoint.dcp.sources import Direct, Mounted, Source
from framework.checkpoint.files import PIECE_BYTES, DamagedError, FileRecord, num_pieces
from framework.checkpoint.manifest import METADATA
from framework.errors import CheckpointError
from framework.rundir import RunDirectory
from framework.speaking import Report, progress
from framework.volume import Volume, open_volume

THREADS = 4


def transfer(opened: Opened, target: str) -> tuple[int, int]:
    """Makes a place hold a checkpoint.

    Args:
        opened: The checkpoint.
        target: A folder or URL, for this checkpoint alone.

    Returns:
        Bytes that were copied, and bytes of all files.

    Raises:
        CheckpointError: The target holds something else, or one side is damaged; nothing was published then.
        VolumeError: The target cannot be written.
    """
    if not is_url(target):
        _refuse_run(Path(target), opened)
    volume = open_volume(target)
    records = _records(opened)
    small = {opened.proven.manifest_name: opened.proven.manifest} if opened.files is not None else {}
    is_there = _refuse_others(volume, opened, {*records, *small})
    size = sum(record.size for record in records.values()) + sum(map(len, small.values())) + len(opened.proven.metadata)
    with progress(f"copying to {target}", 2 * sum(record.size for record in records.values())) as report:
        copied = sum(each(THREADS, lambda item: _send(opened, volume, item[0], item[1], report), records.items()))
    for name, data in small.items():
        if _read(volume, name) != data:
            volume.put(name, data)
            copied += len(data)
    for name, data in small.items():
        if volume.read(name) != data:
            raise DamagedError(f"{volume.shown(name)} does not hold what was written; nothing was published.")
    if not is_there:
        volume.put(METADATA, opened.proven.metadata)
        copied += len(opened.proven.metadata)
    if volume.read(METADATA) != opened.proven.metadata:
        raise DamagedError(f"{volume.shown(METADATA)} does not hold what was written.")
    return copied, size


def _refuse_run(target: Path, opened: Opened) -> None:
    """A run's own folders are the run's."""
    if is_run(target) or (target.name == "checkpoints" and is_run(target.parent)):
        where = target if target.name == "checkpoints" else target / "checkpoints"
        step = opened.header.step if opened.header is not None else 0
        raise CheckpointError(f"{target} belongs to a run. Give the checkpoint's own folder: {where}/step_{step:010d}")
    if target.parent.name == "checkpoints" and is_run(target.parent.parent):
        wanted = f"step_{opened.header.step:010d}" if opened.header is not None else None
        if target.name != wanted:
            advice = f"there this one is called {wanted}" if wanted else "only checkpoints of runs belong there"
            raise CheckpointError(f"{target} lies in a run: {advice}.")
        RunDirectory(target.parent.parent).refuse_live_owner()


def _refuse_others(volume: Volume, opened: Opened, names: set[str]) -> bool:
    """Whether the checkpoint is published there already; anything else that is there is refused."""
    if volume.path is not None and os.path.lexists(volume.path) and not volume.path.is_dir():
        raise CheckpointError(f"{volume.place} is no folder. Give another one.")
    there = {entry.name for entry in volume.list()}
    if METADATA in there and volume.read(METADATA) != opened.proven.metadata:
        raise CheckpointError(f"{volume.place} holds another checkpoint, which is not overwritten. Give another place.")
    if others := sorted(there - names - {METADATA}):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise CheckpointError(
            f"{volume.place} holds files that are not of {opened.place}: {', '.join(others[:3])}{more}. "
            f"Give a new folder."
        )
    return METADATA in there


def _records(opened: Opened) -> Mapping[str, FileRecord]:
    """Sizes and checksums; those of a stock checkpoint are made here, of the bytes as they are."""
    if opened.files is not None:
        return opened.files
    names = sorted({at.relative_path for at in opened.record.storage_data.values()})
    sizes = {name: opened.source.size(name) or 0 for name in names}
    with progress(f"summing {opened.place}", sum(sizes.values())) as report:
        return {name: FileRecord(size, tuple(_sums(opened, name, size, report))) for name, size in sizes.items()}


def _sums(opened: Opened, name: str, size: int, report: Report) -> Iterator[int]:
    for begin in range(0, size, PIECE_BYTES):
        piece = opened.read_range(name, begin, min(PIECE_BYTES, size - begin))
        report(len(piece))
        yield files.crc32(piece)


def _send(opened: Opened, volume: Volume, name: str, record: FileRecord, report: Report) -> int:
    """Copies a file unless it is there with the right bytes; returns how many bytes were copied."""
    target = Mounted(volume.path) if volume.path is not None else Direct(volume)
    if target.size(name) == record.size and _is_right(target, name, record):
        report(2 * record.size)
        return 0
    volume.upload(name, _pieces(opened, name, record, report), record.size)
    for number in range(num_pieces(record.size)):
        try:
            target.prove(name, record, number)
        except DamagedError as error:
            raise type(error)(f"{volume.place}: {error}, right after it was written; nothing was published.") from error
        report(min(PIECE_BYTES, record.size - number * PIECE_BYTES))
    return record.size


def _is_right(target: Source, name: str, record: FileRecord) -> bool:
    try:
        for number in range(num_pieces(record.size)):
            target.prove(name, record, number)
    except DamagedError:
        return False
    return True


def _pieces(opened: Opened, name: str, record: FileRecord, report: Report) -> Iterator[bytes]:
    for number, crc in enumerate(record.crc32):
        begin = number * PIECE_BYTES
        piece = opened.read_range(name, begin, min(PIECE_BYTES, record.size - begin))
        if files.crc32(piece) != crc:
            raise DamagedError(
                f"{opened.place}: {name} is damaged between bytes {begin:,} and {begin + len(piece):,} (checksum differs)"
            )
        report(len(piece))
        yield piece


def _read(volume: Volume, name: str) -> bytes:
    return volume.read(name) if volume.size(name) is not None else b""
