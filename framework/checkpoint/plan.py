"""Which rank writes which tensor, and where its bytes lie in the shard files.

Guarantee: torch's own planners say what each rank holds and check the whole; what several ranks hold is divided
between them, so that all write about the same amount. A plan holds as long as keys, shapes, dtypes, placements and
shared memory stay what they are; when they change on any rank, all ranks plan anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from framework.checkpoint import compat
from framework.checkpoint.spread import divide
from framework.checkpoint.structure import Structure
from framework.distributed import Group
from framework.errors import CheckpointError

ALIGNMENT = 64  # of a payload in memory
PAGE = 4096  # of a file in memory
FILE_BYTES = 4 << 30  # object stores take parts of up to 5,000 MiB at once

Path = tuple[str, ...]
Cut = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Flat:
    """The tensors of a state by joined key.

    Args:
        tensors: The live tensors that are stored, by key; of several that share their memory, the first.
        aliases: The others, each with the key of the stored one.
        paths: Where each key, stored or alias, stands in the nested state.
        signature: Equal as long as a plan for this state holds.
        structure: To see later whether the state is still made of these tensors.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    paths: dict[str, Path]
    signature: tuple[Any, ...]
    structure: Structure


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
    cut: Cut = None


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
    if value.is_quantized:
        problem = "is quantized"
    elif value.layout != torch.strided:
        problem = f"has layout {value.layout}"
    elif not compat.is_plain(value) and not compat.is_distributed(value):
        problem = f"is a {type(value).__name__}"
    elif value.is_meta:
        problem = "is on the meta device and has no values"
    if problem:
        raise CheckpointError(f"The tensor under '{key}' {problem}; only plain tensors and DTensors can be saved.")
    return value


def describe(tensors: Mapping[str, Any], previous: Flat | None = None) -> Flat:
    """Joined keys, shared memory and signature of a state.

    Args:
        tensors: The state.
        previous: What was described last; it is returned itself if nothing changed since, which costs little.

    Raises:
        CheckpointError: Two leaves have the same joined key, or a leaf cannot be saved.
    """
    if previous is not None and previous.structure.holds(tensors):
        return previous
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
        kind = (part.dtype, part.shape, part.device, part.is_conj(), part.is_neg(), _placement(tensor))
        owner = owners.setdefault((part.data_ptr(), part.stride(), kind), key) if part.numel() else key
        if owner == key:
            stored[key] = tensor
        else:
            aliases[key] = owner
        signature.append((path, owner, kind))
    return Flat(stored, aliases, paths, tuple(signature), Structure(tensors))


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
    proposals = group.all_gather(_Proposal(planner.create_local_plan(), flat.aliases, flat.paths))
    answer: Plan | str | None = None
    if group.world.is_main:
        try:
            answer = _global_plan(proposals)
        except Exception as error:  # every rank must hear of it, whatever it is
            answer = f"The state cannot be planned over {group.world.size} ranks: {error}"
    answer = group.broadcast(answer)
    if not isinstance(answer, Plan):
        raise CheckpointError(answer)
    return answer


def _global_plan(proposals: list[_Proposal]) -> Plan:
    _check_replicas(proposals)
    pieces = divide([proposal.plan for proposal in proposals])
    plans, metadata = create_default_global_save_plan([SavePlan([one.item for one in part]) for part in pieces])
    if problems := compat.problems_of(plans, metadata):
        raise CheckpointError("; ".join(problems[:5]))
    stored = metadata.state_dict_metadata
    aliases: dict[str, str] = {}
    paths: dict[str, Path] = {}
    for proposal in proposals:
        paths |= proposal.paths
        aliases |= {key: owner for key, owner in proposal.aliases.items() if key not in stored}
    stored |= {key: stored[owner] for key, owner in aliases.items()}
    metadata.planner_data = paths
    metadata.version = compat.DCP_VERSION
    cuts = [[one.cut for one in part] for part in pieces]
    layouts = tuple(lay_out(plan.items, part) for plan, part in zip(plans, cuts, strict=True))
    return Plan(layouts, metadata, aliases)


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


def lay_out(items: Sequence[WriteItem], cuts: Sequence[Cut]) -> Layout:
    """Places tensors in shard files one after the other, each payload on a multiple of 64 bytes in memory.

    Args:
        items: What a rank writes, in the order of the files.
        cuts: Of each item, which rows of the rank's own part it is.
    """
    entries: list[Entry] = []
    sizes: list[int] = []
    starts: list[int] = []
    for item, cut in zip(items, cuts, strict=True):
        assert item.tensor_data is not None
        shape = tuple(item.tensor_data.chunk.sizes)
        dtype = item.tensor_data.properties.dtype
        frame = compat.framing(dtype, shape)
        if not sizes or (sizes[-1] and sizes[-1] + frame.size > FILE_BYTES):
            starts.append(_round_up(starts[-1] + sizes[-1], PAGE) if sizes else 0)
            sizes.append(0)
        offset = _round_up(sizes[-1] + len(frame.prefix), ALIGNMENT) - len(frame.prefix)
        entries.append(Entry(item.index.fqn, item.index, dtype, shape, len(sizes) - 1, offset, frame, cut))
        sizes[-1] = offset + frame.size
    return Layout(tuple(entries), tuple(sizes), tuple(starts))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
