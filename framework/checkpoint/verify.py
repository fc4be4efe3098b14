"""Whether a checkpoint is whole: every byte of it, without changing anything.

Guarantee: a checkpoint that passes was written in full by one save, is the one that its folder is named for, and
every tensor in it lies in bytes whose checksums are right. The work can be shared between ranks.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from framework.checkpoint import files
from framework.checkpoint.files import num_pieces
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
    return manifest, read_record(pickled, manifest.files)


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
    threads = max(1, min(4, (os.cpu_count() or 1) // local_size))

    def check(piece: tuple[str, int]) -> None:
        name, number = piece
        files.check_piece(folder / name, manifest.files[name], number)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(check, share):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
