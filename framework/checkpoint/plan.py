"""Which rank writes which tensor, and where its bytes lie in the shard files.

Guarantee: torch's own planners decide over all ranks; replicas are spread over the ranks by size, largest first, so
that all write about the same amount. A plan holds as long as keys, shapes, dtypes, placements and shared memory stay
what they are; when they change on any rank, all ranks plan anew.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from framework.checkpoint import compat
from framework.distributed import Group
from framework.errors import CheckpointError

ALIGNMENT = 64  # of a payload in memory
PAGE = 4096  # of a file in memory
FILE_BYTES = 4 << 30  # object stores take parts of up to 5,000 MiB at once

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flat:
    """The tensors of a state by joined key.

    Args:
        tensors: The live tensors that are stored, by key; of several that share their memory, the first.
        aliases: The others, each with the key of the stored one.
        paths: Where each key, stored or alias, stands in the nested state.
        signature: Equal as long as a plan for this state holds.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    paths: dict[str, Path]
    signature: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor (or this rank's shard of it) lies.

    Args:
        key: Joined key.
        index: torch's name for it.
        dtype: Its dtype.
        shape: Its shape, of the shard if it is one.
        number: Number of the file, from 0.
        offset: Where the framed tensor begins in that file, in bytes.
        framing: The bytes around the payload.
        cut: First row and number of rows of the rank's own part that this is; none if it is all of it.
    """

    key: str
    index: MetadataIndex
    dtype: torch.dtype
    shape: tuple[int, ...]
    number: int
    offset: int
    framing: compat.Framing
    cut: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank writes.

    Args:
        entries: Its tensors, in the order of the files.
        sizes: Bytes of each shard file.
        starts: Where each file begins in memory, in bytes.
    """

    entries: tuple[Entry, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def memory_bytes(self) -> int:
        """Memory for all files."""
        return self.starts[-1] + self.sizes[-1] if self.sizes else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The agreed plan, as one rank knows it.

    Args:
        layouts: What each rank writes, by rank.
        metadata: torch's record of the whole checkpoint, without the places of the bytes.
        aliases: Keys that share the bytes of another key.
    """

    layouts: tuple[Layout, ...]
    metadata: Metadata
    aliases: Mapping[str, str]


def part_of(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """What of a live tensor lies in an entry: a view of this rank's part of it."""
    part = compat.local_part(tensor).detach()
    return part if entry.cut is None else part.narrow(0, *entry.cut)


def flatten(tensors: Mapping[str, Any]) -> dict[Path, torch.Tensor]:
    """The leaves of nested mappings, by path.

    Raises:
        CheckpointError: A leaf is no tensor with bytes of its own; the message names its key.
    """
    leaves: dict[Path, torch.Tensor] = {}

    def visit(value: Any, path: Path) -> None:
        if isinstance(value, Mapping):
            for key, child in value.items():
                visit(child, (*path, str(key)))
        else:
            leaves[path] = _plain(value, ".".join(path))

    visit(tensors, ())
    return leaves


def _plain(value: Any, key: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"The state under '{key}' is a {type(value).__name__}, not a tensor. Python values belong in the shared "
            f"or the rank part of the state."
        )
    problem = None
    if value.layout != torch.strided or value.is_quantized:
        problem = f"has layout {value.layout}" if not value.is_quantized else "is quantized"
    elif value.is_meta:
        problem = "is on the meta device and has no values"
    elif type(value) not in (torch.Tensor, torch.nn.Parameter) and not compat.is_distributed(value):
        problem = f"is a {type(value).__name__}"
    if problem:
        raise CheckpointError(f"The tensor under '{key}' {problem}; only plain tensors and DTensors can be saved.")
    return value


def describe(tensors: Mapping[str, Any]) -> Flat:
    """Joined keys, shared memory and signature of a state.

    Raises:
        CheckpointError: Two leaves have the same joined key, or a leaf cannot be saved.
    """
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    paths: dict[str, Path] = {}
    owners: dict[Any, str] = {}
    signature: list[Any] = []
    for path, tensor in flatten(tensors).items():
        key = ".".join(path)
        if key in paths:
            raise CheckpointError(f"Two tensors of the state have the key '{key}': {paths[key]} and {path}.")
        paths[key] = path
        part = compat.local_part(tensor)
        kind = (part.dtype, part.shape, part.device, _placement(tensor))
        owner = owners.setdefault((part.data_ptr(), part.stride(), kind), key) if part.numel() else key
        if owner == key:
            stored[key] = tensor
        else:
            aliases[key] = owner
        signature.append((path, owner, kind))
    return Flat(stored, aliases, paths, tuple(signature))


def _placement(tensor: torch.Tensor) -> Any:
    if not compat.is_distributed(tensor):
        return None
    spread: Any = tensor
    mesh = spread.device_mesh
    return str(spread.placements), str(mesh), str(mesh.get_coordinate()), tuple(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What one rank brings to the planning."""

    plan: SavePlan
    aliases: dict[str, str]
    paths: dict[str, Path]


def agree(flat: Flat, group: Group) -> Plan:
    """Plans over all ranks. A collective.

    Raises:
        CheckpointError: The states of the ranks do not fit together; the same on all ranks.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(flat.tensors, is_coordinator=group.world.is_main)
    proposals = group.all_gather(_Proposal(_by_size(planner.create_local_plan()), flat.aliases, flat.paths))
    answer: Plan | str | None = None
    if group.world.is_main:
        try:
            answer = _global_plan(planner, proposals)
        except Exception as error:  # every rank must hear of it, whatever it is
            answer = f"The state cannot be planned over {group.world.size} ranks: {error}"
    answer = group.broadcast(answer)
    if not isinstance(answer, Plan):
        raise CheckpointError(answer)
    return answer


def _by_size(plan: SavePlan) -> SavePlan:
    """torch's deduplication gives each replica to the rank with the least so far, in the order of the items."""
    return dataclasses.replace(plan, items=sorted(plan.items, key=lambda i: (-_bytes(i), i.index.fqn)))


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


def _global_plan(planner: DefaultSavePlanner, proposals: list[_Proposal]) -> Plan:
    _check_replicas(proposals)
    plans, metadata = planner.create_global_plan([proposal.plan for proposal in proposals])
    stored = metadata.state_dict_metadata
    aliases: dict[str, str] = {}
    paths: dict[str, Path] = {}
    for proposal in proposals:
        paths |= proposal.paths
        aliases |= {key: owner for key, owner in proposal.aliases.items() if key not in stored}
    stored |= {key: stored[owner] for key, owner in aliases.items()}
    metadata.planner_data = paths
    metadata.version = compat.DCP_VERSION
    return Plan(tuple(lay_out(plan.items) for plan in plans), metadata, aliases)


def _check_replicas(proposals: list[_Proposal]) -> None:
    seen: dict[str, tuple[int, Any]] = {}
    for rank, proposal in enumerate(proposals):
        for item in proposal.plan.items:
            data = item.tensor_data
            if data is None:
                raise CheckpointError(f"'{item.index.fqn}' is no tensor")
            kind = (list(data.size), data.properties.dtype)
            first, other = seen.setdefault(item.index.fqn, (rank, kind))
            if kind != other:
                raise CheckpointError(
                    f"'{item.index.fqn}' has shape and dtype {other} on rank {first} and {kind} on rank {rank}"
                )


def lay_out(items: list[WriteItem]) -> Layout:
    """Places tensors in shard files one after the other, each payload on a multiple of 64 bytes in memory."""
    entries: list[Entry] = []
    sizes: list[int] = []
    starts: list[int] = []
    for item in items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        dtype = item.tensor_data.properties.dtype
        frame = compat.framing(dtype, tuple(chunk.sizes))
        if not sizes or (sizes[-1] and sizes[-1] + frame.size > FILE_BYTES):
            starts.append(_round_up(starts[-1] + sizes[-1], PAGE) if sizes else 0)
            sizes.append(0)
        offset = _round_up(sizes[-1] + len(frame.prefix), ALIGNMENT) - len(frame.prefix)
        entries.append(Entry(item.index.fqn, item.index, dtype, tuple(chunk.sizes), len(sizes) - 1, offset, frame))
        sizes[-1] = offset + frame.size
    return Layout(tuple(entries), tuple(sizes), tuple(starts))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
