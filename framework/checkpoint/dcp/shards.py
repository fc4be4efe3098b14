"""What one rank writes: its tensors and values as torch saves them, laid out in files.

Guarantee: sizes are known before the first byte is written, no tensor is copied as a whole on the CPU, and no file is
longer than asked for as long as one row of a tensor is not; longer tensors are cut by rows, which torch reads as it
reads any sharding.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from zlib_ng.zlib_ng import crc32

from framework.checkpoint import compat
from framework.checkpoint.dcp import values
from framework.checkpoint.files import PIECE_BYTES, WRITE_BYTES, FileRecord
from framework.errors import CheckpointError

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that torch reads as one tensor or value.

    Args:
        planned: torch's name for what it is a part of.
        index: torch's name for it.
        chunk: Where it lies in its tensor; none for a value.
        size: Bytes.
        parts: Makes the bytes.
    """

    planned: MetadataIndex
    index: MetadataIndex
    chunk: ChunkStorageMetadata | None
    size: int
    parts: Callable[[], Iterable[Bytes]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies.

    Args:
        planned: torch's name for what it is a part of.
        index: torch's name for it.
        chunk: Where it lies in its tensor; none for a value.
        number: Number of the file.
        offset: Its first byte there.
        length: Bytes.
    """

    planned: MetadataIndex
    index: MetadataIndex
    chunk: ChunkStorageMetadata | None
    number: int
    offset: int
    length: int


@dataclass(slots=True)
class Shard:
    """One file to be written.

    Args:
        pieces: What is in it, in order.
        size: Bytes.
    """

    pieces: list[Piece] = field(default_factory=list)
    size: int = 0

    def parts(self) -> Iterator[Bytes]:
        """Its bytes."""
        for piece in self.pieces:
            yield from piece.parts()


def lay_out(items: Iterable[WriteItem], planner: SavePlanner, file_bytes: int) -> tuple[list[Shard], list[Place]]:
    """The files of a rank.

    Tensors that share their memory are laid out once.

    Args:
        items: What to write.
        planner: Gives the tensors and values.
        file_bytes: Length at which a new file begins.

    Raises:
        CheckpointError: A value could be written, but not be read again.
    """
    shards: list[Shard] = []
    places: list[Place] = []
    seen: dict[tuple[Any, ...], list[Place]] = {}
    for item in items:
        data = planner.resolve_data(item)
        memory = _memory(data)
        if memory is not None and memory in seen and _is_whole(item):
            places += [_alias(item, place) for place in seen[memory]]
            continue
        placed = []
        for piece in _pieces(item, data, file_bytes):
            if not shards or (shards[-1].size and shards[-1].size + piece.size > file_bytes):
                shards.append(Shard())
            at = Place(piece.planned, piece.index, piece.chunk, len(shards) - 1, shards[-1].size, piece.size)
            shards[-1].pieces.append(piece)
            shards[-1].size += piece.size
            placed.append(at)
        places += placed
        if memory is not None and _is_whole(item):
            seen[memory] = placed
    return shards, places


def _memory(data: Any) -> tuple[Any, ...] | None:
    """What two tensors with the same bytes in the same memory have in common."""
    if not isinstance(data, torch.Tensor) or not values.is_plain(data) or not data.numel():
        return None
    views = (data.is_conj(), data.is_neg())  # what the bytes are read as: a conjugate has the memory of its tensor
    return data.device, data.data_ptr(), data.dtype, tuple(data.shape), data.stride(), views


def _is_whole(item: WriteItem) -> bool:
    return item.type is WriteItemType.TENSOR


def _alias(item: WriteItem, place: Place) -> Place:
    index = MetadataIndex(item.index.fqn, place.index.offset)
    return Place(item.index, index, place.chunk, place.number, place.offset, place.length)


def _pieces(item: WriteItem, data: Any, file_bytes: int) -> Iterator[Piece]:
    if isinstance(data, io.BytesIO):
        raw = data.getvalue()
        values.load(raw, f"'{item.index.fqn}' could be saved, but")  # a restart is too late to find out
        yield Piece(item.index, item.index, None, len(raw), lambda: [raw])
        return
    assert isinstance(data, torch.Tensor) and item.tensor_data is not None
    whole = item.tensor_data.chunk
    tensor = data.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"'{item.index.fqn}' {_strangeness(tensor)}, which could not be loaded again.")
    if not values.is_plain(tensor):
        raw = values.dump(tensor.cpu())
        values.load(raw, f"'{item.index.fqn}' could be saved, but")
        yield Piece(item.index, item.index, whole, len(raw), lambda: [raw])
        return
    for first, count in _cuts(tuple(tensor.shape), tensor.element_size(), file_bytes):
        part = tensor if count is None else tensor.narrow(0, first, count)
        frame = compat.framing(part.dtype, tuple(part.shape))
        chunk, index = whole, item.index
        if count is not None:
            offsets = torch.Size((whole.offsets[0] + first, *whole.offsets[1:]))
            chunk, index = ChunkStorageMetadata(offsets, part.shape), MetadataIndex(item.index.fqn, offsets)
        yield Piece(item.index, index, chunk, frame.size, _framed(part, frame))


def _strangeness(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "is on the meta device and has no values"
    return "is quantized" if tensor.is_quantized else f"has layout {tensor.layout}"


def _cuts(shape: tuple[int, ...], item_bytes: int, limit: int) -> Iterator[tuple[int, int | None]]:
    """First row and number of rows of each part; no number: all of it."""
    if not shape or math.prod(shape) * item_bytes <= limit:
        yield 0, None
        return
    rows = max(1, limit // (math.prod(shape[1:]) * item_bytes))
    for first in range(0, shape[0], rows):
        yield first, min(rows, shape[0] - first)


def _framed(tensor: torch.Tensor, frame: compat.Framing) -> Callable[[], Iterator[Bytes]]:
    def parts() -> Iterator[Bytes]:
        yield frame.prefix
        if frame.payload_bytes:
            view = compat.bytes_of(values.on_host(tensor))
            for at in range(0, len(view), WRITE_BYTES):
                yield view[at : at + WRITE_BYTES]
        if frame.suffix:
            yield frame.suffix

    return parts


class Summing:
    """Passes bytes on and sums them on the way.

    Args:
        parts: The bytes.
    """

    def __init__(self, parts: Iterable[Bytes]) -> None:
        self._parts = parts
        self._sums: list[int] = []
        self._size = 0

    def __iter__(self) -> Iterator[Bytes]:
        for part in self._parts:
            view = memoryview(part).cast("B")
            while view:
                filled = self._size % PIECE_BYTES
                if not filled:
                    self._sums.append(0)
                step = view[: PIECE_BYTES - filled]
                self._sums[-1] = crc32(step, self._sums[-1])
                self._size += len(step)
                view = view[len(step) :]
            yield part

    @property
    def record(self) -> FileRecord:
        """Size and checksums of what went through."""
        return FileRecord(self._size, tuple(self._sums))
