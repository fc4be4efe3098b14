"""From the bytes of a checkpoint into the live tensors.

Guarantee: what lies in the file as this torch would write it is read straight into the memory of the tensor; anything
else goes through torch's own restricted reader. Any sharding is read into any other.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from framework.checkpoint import compat, files
from framework.checkpoint.compat import StorageInfo
from framework.checkpoint.files import DamagedError

Shape = tuple[int, ...]


def fill(folder: Path, record: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads every tensor, each in the shape and dtype it has in the checkpoint.

    Args:
        folder: The checkpoint; its bytes have been verified.
        record: torch's record of it.
        tensors: The live tensors by joined key, plain or DTensor, on any device.

    Raises:
        DamagedError: A file cannot be read, or does not hold what the record says.
    """
    shapes = {
        MetadataIndex(key, chunk.offsets): tuple(chunk.sizes)
        for key in tensors
        for chunk in _described(record, key).chunks
    }
    by_file: dict[str, list[tuple[StorageInfo, ReadItem]]] = defaultdict(list)
    for item in create_default_local_load_plan(dict(tensors), record).items:
        place = record.storage_data[item.storage_index]
        by_file[place.relative_path].append((place, item))
    with torch.no_grad():
        for name, items in by_file.items():
            with files.opened(folder / name) as fd:
                for place, item in sorted(items, key=lambda pair: pair[0].offset):
                    key = item.storage_index.fqn
                    target = compat.local_part(tensors[item.dest_index.fqn]).detach()
                    target = _narrow(target, item.dest_offsets, item.lengths)
                    if target.numel():
                        dtype = _described(record, key).properties.dtype
                        _read(fd, place, item, dtype, shapes[item.storage_index], target)


def _described(record: Metadata, key: str) -> TensorStorageMetadata:
    entry = record.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _read(fd: int, place: StorageInfo, item: ReadItem, dtype: torch.dtype, shape: Shape, target: torch.Tensor) -> None:
    is_whole = tuple(item.lengths) == shape
    is_direct = is_whole and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
    chunk = _read_plain(fd, place, dtype, shape, target if is_direct else None)
    if chunk is None:
        chunk = _read_saved(fd, place, dtype, shape)
    if chunk is not target:
        target.copy_(_narrow(chunk, item.storage_offsets, item.lengths))


def _read_plain(
    fd: int, place: StorageInfo, dtype: torch.dtype, shape: Shape, target: torch.Tensor | None
) -> torch.Tensor | None:
    """Reads the payload of a tensor that is framed as this torch frames it; none if it is not."""
    if math.prod(shape) * dtype.itemsize > place.length:
        return None
    frame = compat.framing(dtype, shape)
    if frame.size != place.length:
        return None
    chunk = torch.empty(shape, dtype=dtype) if target is None else target
    payload = compat.bytes_of(chunk)
    prefix = memoryview(bytearray(len(frame.prefix)))
    files.read_into(fd, [prefix, payload], place.offset, place.relative_path)
    return chunk if prefix == frame.prefix else None


def _read_saved(fd: int, place: StorageInfo, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """Lets torch read a saved tensor, without running code."""
    raw = bytearray(place.length)
    files.read_into(fd, [memoryview(raw)], place.offset, place.relative_path)
    try:
        tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything here
        raise DamagedError(f"{place.relative_path} holds no tensor at byte {place.offset}: {error}") from error
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise DamagedError(f"{place.relative_path} does not hold a {dtype} {list(shape)} at byte {place.offset}")
    return tensor


def _narrow(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor
