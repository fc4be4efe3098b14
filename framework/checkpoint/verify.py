"""Whether a checkpoint is whole: every byte of it, without changing anything.

Guarantee: a checkpoint that passes was written in full by one save, is the one that its folder is named for, and
every tensor in it lies in bytes whose checksums are right. The work can be shared between ranks.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from framework.checkpoint import files
from framework.checkpoint.files import DamagedError, num_pieces
from framework.checkpoint.manifest import METADATA, Manifest, unseal
from framework.checkpoint.record import read_record
from framework.checkpoint.store import read_header


def check_structure(folder: Path, step: int) -> tuple[Manifest, Metadata]:
    """Manifest and torch's record of a checkpoint; everything but the checksums of the files is checked.

    Raises:
        DamagedError: Something is wrong; the message names the file.
    """
    manifest = read_header(folder, step)
    pickled, _ = unseal(files.read(folder / METADATA))
    record = read_record(pickled, manifest.files)
    check_cover(record)
    return manifest, record


def check_cover(record: Metadata) -> None:
    """Whether the stored chunks of every tensor make up the whole of it.

    Raises:
        DamagedError: One lies outside of its tensor, or a part of a tensor is in none; the message names the key.
    """
    for key, entry in record.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        covered = 0
        for chunk in entry.chunks:
            covered += math.prod(chunk.sizes)
            dims = len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            bounds = zip(entry.size, chunk.offsets, chunk.sizes, strict=False)
            if not dims or any(not 0 <= offset <= offset + length <= size for size, offset, length in bounds):
                raise DamagedError(f".metadata has a part of '{key}' that lies outside of its {list(entry.size)}")
        if covered != math.prod(entry.size):
            raise DamagedError(f".metadata has {covered:,} of the {math.prod(entry.size):,} elements of '{key}'")


def check_bytes(folder: Path, manifest: Manifest, *, rank: int = 0, size: int = 1, local_size: int = 1) -> None:
    """Compares all files with their checksums, or this rank's share of the pieces.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        rank: Whose share.
        size: Among how many the pieces are shared.
        local_size: How many of them run on this host and share its cores.

    Raises:
        DamagedError: A piece differs; the message names file and bytes.
    """
    pieces = [(name, n) for name, record in manifest.files.items() for n in range(num_pieces(record.size))]
    share = pieces[rank::size]

    def check(piece: tuple[str, int]) -> None:
        name, number = piece
        files.check_piece(folder / name, manifest.files[name], number)

    with ThreadPoolExecutor(files.num_threads(local_size)) as pool:
        try:
            for _ in pool.map(check, share):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
