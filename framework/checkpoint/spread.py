"""Divides between the ranks what several of them could write.

Guarantee: everything is written once. Ranks write about the same number of bytes, also with one tensor that is larger
than the share of a rank: it is cut between its rows. What only one rank holds stays with it, and the others get more
of the rest. The same plans give the same division.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from framework.checkpoint import compat

SLACK = 100  # a tensor that exceeds the share of a rank by less than a hundredth of it is not cut
WORTH = 4  # a piece has at least this many times the bytes that stand around each piece


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank writes of a tensor.

    Args:
        item: torch's description of it.
        cut: First row and number of rows of the rank's own part of the tensor; none if it is all of it.
    """

    item: WriteItem
    cut: tuple[int, int] | None = None


def divide(plans: Sequence[SavePlan]) -> list[list[Piece]]:
    """What each rank writes.

    Args:
        plans: What each rank holds, replicas on all that have them.
    """
    holders: dict[tuple[MetadataIndex, torch.Size], list[int]] = defaultdict(list)
    items: dict[tuple[MetadataIndex, torch.Size], WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            place = (item.index, item.tensor_data.chunk.sizes)
            holders[place].append(rank)
            items.setdefault(place, item)
    groups: dict[tuple[int, ...], list[WriteItem]] = defaultdict(list)
    for place, found in holders.items():
        groups[tuple(found)].append(items[place])
    loads = [0] * len(plans)
    pieces: list[list[Piece]] = [[] for _ in plans]
    # what can go to few ranks only is placed first, so that the rest evens it out
    for ranks, group in sorted(groups.items(), key=lambda one: (len(one[0]), one[0])):
        _pour(sorted(group, key=_order), ranks, loads, pieces)
    return pieces


def _order(item: WriteItem) -> tuple[int, str, tuple[int, ...]]:
    """The largest first: the small ones then even out what is left."""
    return -_payload(item), item.index.fqn, tuple(item.index.offset or ())


def _pour(items: list[WriteItem], ranks: Sequence[int], loads: list[int], pieces: list[list[Piece]]) -> None:
    """Gives items to the ranks that all hold them, each to the one with the most room up to a common level."""
    level = _level([loads[rank] for rank in ranks], sum(_size(item) for item in items))
    slack = level // SLACK
    room = [(loads[rank] - level, rank) for rank in ranks]
    heapq.heapify(room)
    for item in items:
        rows, row_bytes, frame_bytes = _measures(item)
        least = -(-WORTH * frame_bytes // max(row_bytes, 1))
        first = 0
        while first < rows:
            lack, rank = room[0]
            left = rows - first
            is_whole = left <= least or frame_bytes + left * row_bytes <= slack - lack
            count = left if is_whole else min(max(least, round((-lack - frame_bytes) / row_bytes)), left)
            pieces[rank].append(_piece(item, first, count, rows))
            added = frame_bytes + count * row_bytes
            loads[rank] += added
            heapq.heapreplace(room, (lack + added, rank))
            first += count


def _level(loads: list[int], amount: int) -> int:
    """How full the ranks are when the amount is poured over them, like water into vessels of one width."""
    loads = sorted(loads)
    for number in range(1, len(loads)):
        below = number * loads[number] - sum(loads[:number])
        if below >= amount:
            return (sum(loads[:number]) + amount) // number
    return (sum(loads) + amount) // len(loads)


def _measures(item: WriteItem) -> tuple[int, int, int]:
    """Rows, bytes of a row, and bytes around the payload. What has no rows is one."""
    payload = _payload(item)
    assert item.tensor_data is not None
    sizes = item.tensor_data.chunk.sizes
    rows = sizes[0] if sizes and payload else 1
    return rows, payload // rows, _size(item) - payload


def _payload(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


def _size(item: WriteItem) -> int:
    """Bytes in a file; those around the payload count where there are thousands of small tensors."""
    assert item.tensor_data is not None
    return compat.framing(item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)).size


def _piece(item: WriteItem, first: int, count: int, rows: int) -> Piece:
    if count == rows:
        return Piece(item)
    data = item.tensor_data
    assert data is not None
    offset = torch.Size([data.chunk.offsets[0] + first, *data.chunk.offsets[1:]])
    chunk = ChunkStorageMetadata(offset, torch.Size([count, *data.chunk.sizes[1:]]))
    cut = WriteItem(
        MetadataIndex(item.index.fqn, offset), WriteItemType.SHARD, tensor_data=dataclasses.replace(data, chunk=chunk)
    )
    return Piece(cut, (first, count))
