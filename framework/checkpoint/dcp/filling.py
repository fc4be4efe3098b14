"""From the bytes of a checkpoint into tensors.

Guarantee: of a tensor only those rows are read that are needed, straight into the memory of the target where that is
possible; what is not laid out as this torch does it goes through torch's own restricted reader.
"""

from __future__ import annotations

import dataclasses
import io
import math
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from framework.checkpoint import compat
from framework.checkpoint.compat import StorageInfo
from framework.checkpoint.dcp.sources import Source
from framework.checkpoint.files import DamagedError


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one read item needs.

    Args:
        item: torch's read item.
        place: Where its tensor or value lies.
        shape: Shape of the saved tensor there; none for a value.
        dtype: Its dtype; none for a value.
        frame: How this torch would lay it out, if that may be how it is.
        first: First byte needed of the payload.
        count: Number of bytes needed of it; all of the entry is needed if there is no frame.
    """

    item: ReadItem
    place: StorageInfo
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    frame: compat.Framing | None = None
    first: int = 0
    count: int = 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The bytes of the file that are needed, as first and end."""
        begin = self.place.offset
        if self.frame is None:
            return [(begin, begin + self.place.length)]
        payload = begin + len(self.frame.prefix)
        return [(begin, payload), (payload + self.first, payload + self.first + self.count)]


def wanted(item: ReadItem, record: Metadata, shown: str) -> Wanted:
    """What a read item needs.

    Raises:
        DamagedError: The record does not say where it lies.
    """
    key = item.storage_index.fqn
    place = (record.storage_data or {}).get(item.storage_index)
    if place is None:
        raise DamagedError(f"the record of {shown} does not say where '{key}' lies")
    described = record.state_dict_metadata[key]
    if not isinstance(described, TensorStorageMetadata):
        return Wanted(item, place)
    offset = item.storage_index.offset
    shape = next((tuple(chunk.sizes) for chunk in described.chunks if chunk.offsets == offset), None)
    if shape is None:
        raise DamagedError(f"the record of {shown} has no part of '{key}' at {offset}")
    dtype = described.properties.dtype
    if math.prod(shape) * dtype.itemsize > place.length:
        return Wanted(item, place, shape, dtype)
    frame = compat.framing(dtype, shape)
    if frame.size != place.length:
        return Wanted(item, place, shape, dtype)
    is_rows = bool(shape) and tuple(item.lengths[1:]) == shape[1:]
    if not is_rows or not frame.payload_bytes:
        return Wanted(item, place, shape, dtype, frame, 0, frame.payload_bytes)
    row = math.prod(shape[1:]) * dtype.itemsize
    return Wanted(item, place, shape, dtype, frame, item.storage_offsets[0] * row, item.lengths[0] * row)


def settle(source: Source, want: Wanted) -> Wanted:
    """Looks whether a tensor lies as this torch would lay it; if not, all of its entry is needed.

    Raises:
        DamagedError: The file cannot be read.
    """
    if want.frame is None:
        return want
    prefix = memoryview(bytearray(len(want.frame.prefix)))
    source.read_into(want.place.relative_path, want.place.offset, [prefix])
    return want if prefix == want.frame.prefix else dataclasses.replace(want, frame=None)


def fill(source: Source, want: Wanted, target: torch.Tensor) -> None:
    """Reads a settled tensor, or the part of it that is needed, into a target of its size on any device.

    Raises:
        DamagedError: The file cannot be read, or does not hold what the record says.
    """
    if not target.numel():
        return
    with torch.no_grad():
        if want.frame is None:
            target.copy_(_part(_saved(source, want), want))
        else:
            _fill_plain(source, want, want.frame, target)


def _fill_plain(source: Source, want: Wanted, frame: compat.Framing, target: torch.Tensor) -> None:
    """Reads the payload, or some rows of it."""
    assert want.shape is not None
    is_part = want.count != frame.payload_bytes
    shape = tuple(want.item.lengths) if is_part else want.shape
    is_direct = (
        shape == tuple(target.shape)
        and target.device.type == "cpu"
        and target.is_contiguous()
        and target.dtype == want.dtype
        and not target.is_conj()
        and not target.is_neg()
    )
    chunk = target if is_direct else torch.empty(shape, dtype=want.dtype)
    begin = want.place.offset + len(frame.prefix) + want.first
    source.read_into(want.place.relative_path, begin, [compat.bytes_of(chunk)])
    if not is_direct:
        target.copy_(chunk if is_part else _part(chunk, want))


def _saved(source: Source, want: Wanted) -> torch.Tensor:
    """Lets torch read the whole saved tensor, without running code."""
    place = want.place
    raw = bytearray(place.length)
    if raw:
        source.read_into(place.relative_path, place.offset, [memoryview(raw)])
    try:
        tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything here
        raise DamagedError(f"{place.relative_path} holds no tensor at byte {place.offset}: {error}") from error
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != want.shape:
        raise DamagedError(f"{place.relative_path} holds no tensor {list(want.shape or ())} at byte {place.offset}")
    return tensor


def _part(tensor: torch.Tensor, want: Wanted) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(want.item.storage_offsets, want.item.lengths, strict=True)):
        if length != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor
