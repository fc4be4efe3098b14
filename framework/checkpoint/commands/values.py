"""The Python values of a checkpoint, and where those of two differ.

Guarantee: they are read without running code. Floats and tensors are compared bit by bit: NaN equals the same NaN, and
0.0 is not -0.0. What cannot be read without running code is compared by its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from framework.checkpoint.commands.opened import Opened
from framework.checkpoint.commit import load_values
from framework.checkpoint.dcp import values
from framework.errors import CheckpointError

SHARED = "shared"
LAYOUT = ("world_size", "micro_batch_size", "num_workers")  # how a run was spread: told, but no difference of state
APART = frozenset(f"{SHARED}.{name}" for name in ("elapsed_seconds", "config", *LAYOUT))  # runs need not agree in these
_MISSING = object()


class Unread(bytes):
    """A value that is not read, since that would run code; its bytes."""


def python_values(opened: Opened) -> dict[str, Any]:
    """What a checkpoint holds beside its tensors.

    Returns:
        For one of a run `shared`, and `rank 0` and so on; else values by key.

    Raises:
        CheckpointError: A file cannot be read.
    """
    if opened.header is not None:
        header = opened.header
        names = {SHARED: header.shared_file, **{f"rank {rank}": name for rank, name in header.rank_files.items()}}
        return {part: load_values(name, opened.read_file(name)) for part, name in names.items()}
    found = {}
    for key, entry in opened.record.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            ((name, offset, length),) = opened.places_of(key)
            raw = opened.read_range(name, offset, length)
            try:
                found[key] = values.load(raw, key)
            except CheckpointError:
                found[key] = Unread(raw)
    return found


def shared_values(opened: Opened) -> dict[str, Any]:
    """What a checkpoint of a run holds beside its tensors for all ranks alike; empty for another one.

    Raises:
        CheckpointError: The file cannot be read.
    """
    header = opened.header
    return {} if header is None else load_values(SHARED, opened.read_file(header.shared_file))


def differing(ours: Any, theirs: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Where two values differ: the path, and both values in short."""
    if path in APART:
        return
    if isinstance(ours, Mapping) and type(ours) is type(theirs):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            yield from differing(ours.get(key, _MISSING), theirs.get(key, _MISSING), f"{path}.{key}")
    elif isinstance(ours, list | tuple) and type(ours) is type(theirs) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differing(one, other, f"{path}[{index}]")
    elif not _is_same(ours, theirs):
        yield path, _short(ours), _short(theirs)


def _is_same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, float):
        return struct.pack("d", ours) == struct.pack("d", theirs)
    if isinstance(ours, torch.Tensor):
        is_alike = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        return is_alike and torch.equal(raw_bytes(ours), raw_bytes(theirs))
    if isinstance(ours, np.ndarray | np.generic):
        return bool(ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes())
    return bool(ours == theirs)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor as `[bytes]` uint8."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _short(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    if isinstance(value, Unread):
        return f"{len(value):,} bytes that are not read without running code"
    if isinstance(value, torch.Tensor) and value.numel() > 4:
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, list | tuple | Mapping) and len(repr(value)) > 80:
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80}"
