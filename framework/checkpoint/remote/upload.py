"""From a committed local checkpoint to a remote place: one rank's files.

Guarantee: what is sent has the checksums of the manifest. A file that is there already with its name and size is not
sent again: names carry attempt and number of the save, and are visible only when whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from framework.checkpoint import files
from framework.checkpoint.files import PIECE_BYTES, DamagedError, FileRecord
from framework.volume import Volume

THREADS = 4
_RANK = re.compile(r"(?:__|rank_)(\d+)[_.]")


def rank_of(name: str, world_size: int) -> int:
    """The rank that uploads a file: the one that wrote it; rank 0 for all others."""
    match = _RANK.match(name)
    rank = int(match[1]) if match else 0
    return rank if rank < world_size else 0


def send(volume: Volume, folder: str, source: Path, records: Mapping[str, FileRecord]) -> int:
    """Uploads files, several at a time.

    Args:
        volume: The place of the run.
        folder: Name of the step's folder there.
        source: The local checkpoint.
        records: Sizes and checksums of the files, by name.

    Returns:
        Bytes that were sent.

    Raises:
        DamagedError: A local file is not what was committed.
        VolumeError: A file could not be uploaded.
    """

    def one(name: str, record: FileRecord) -> int:
        target = f"{folder}/{name}"
        if volume.size(target) == record.size:
            return 0
        volume.upload(target, _pieces(source / name, record), record.size)
        return record.size

    with ThreadPoolExecutor(THREADS) as pool:
        tasks = [pool.submit(one, name, record) for name, record in records.items()]
        try:
            return sum(task.result() for task in tasks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pieces(path: Path, record: FileRecord) -> Iterator[memoryview]:
    """The bytes of a local file, each piece compared with its checksum before it is sent."""
    with files.opened(path) as fd:
        size = os.fstat(fd).st_size
        if size != record.size:
            raise DamagedError(f"{path} has {size:,} bytes instead of {record.size:,}")
        for number, crc in enumerate(record.crc32):
            begin = number * PIECE_BYTES
            piece = memoryview(bytearray(min(PIECE_BYTES, record.size - begin)))
            files.read_into(fd, [piece], begin, str(path))
            if files.crc32(piece) != crc:
                raise DamagedError(f"{path} is damaged from byte {begin:,} on (checksum differs)")
            yield piece
