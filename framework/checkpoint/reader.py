"""Finds the newest checkpoint that is whole, and loads it.

Guarantee: everything is verified, by all ranks together, before anything is changed: on disk damaged checkpoints are
set aside only once a good one is found, and a live tensor is written only when keys, shapes and dtypes fit. No code
from a checkpoint runs. Every rank gets the same verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from framework.checkpoint import files
from framework.checkpoint.commit import load_values
from framework.checkpoint.files import DamagedError, FileRecord
from framework.checkpoint.fill import fill
from framework.checkpoint.plan import flatten
from framework.checkpoint.record import entries_of
from framework.checkpoint.remote import tiers
from framework.checkpoint.remote.tier import RemoteTier
from framework.checkpoint.store import CheckpointStore, Found
from framework.checkpoint.verify import check_bytes, check_structure
from framework.distributed import Group, World
from framework.errors import CheckpointError, StateMismatchError

log = logging.getLogger(__name__)
LISTED = 20  # differences named in one message


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that was damaged.

    Args:
        path: Where it was.
        moved_to: Where it lies now; none if it could not be moved.
        reason: What is wrong with it.
    """

    path: Path
    moved_to: Path | None
    reason: str


class CheckpointReader:
    """Reads the checkpoints of a run. `newest_valid` and `load` are collectives.

    Args:
        store: Where they are.
        world: This process among all.
        group: For the agreement between ranks.
        remote: Where else they are; what is newest there is fetched.
    """

    def __init__(self, store: CheckpointStore, world: World, group: Group, *, remote: RemoteTier | None = None) -> None:
        self.store = store
        self.world = world
        self.group = group
        self.remote = remote
        self.rejected: list[Rejected] = []  # what the last `newest_valid` set aside
        self._records: dict[Path, Metadata] = {}

    def newest_valid(self) -> Found | None:
        """The newest checkpoint whose every byte is right; damaged newer ones are set aside, with a reason file.

        Returns:
            The same on all ranks; none if nothing was ever published.

        Raises:
            CheckpointError: There are published checkpoints and none is whole. The message lists each path and
                reason; nothing was changed.
        """
        damaged: list[tuple[Found, str]] = []
        for folder in self._candidates():
            found, verdict = self._judge(folder)
            if verdict is None:
                self._set_aside(damaged)
                return found
            damaged.append((found, verdict))
        if not damaged:
            return None
        lines = "\n".join(f"  {found.path}: {reason}" for found, reason in damaged)
        raise CheckpointError(
            f"None of the {len(damaged)} checkpoints in {self._places()} is whole; nothing was changed:\n{lines}\n"
            f"Put a good copy back, or start anew with another run.name."
        )

    def _judge(self, folder: Path) -> tuple[Found, str | None]:
        """One candidate, and what is wrong with it on any rank; what is damaged here is fetched anew."""
        if self.remote is None:
            return self._verify_together(folder)
        if (reason := tiers.bring(self.remote, folder)) is not None:
            return replace(self.store.look(folder), header=None, damage=reason), reason
        found, reason = self._verify_together(folder)
        if reason is not None and tiers.bring(self.remote, folder, is_thorough=True) is None:
            found, reason = self._verify_together(folder)
        return found, reason

    def _verify_together(self, folder: Path) -> tuple[Found, str | None]:
        found, reason = self._verify(folder)
        reasons = self.group.all_gather(reason)
        return found, next((text for text in reasons if text), None)

    def _places(self) -> str:
        return f"{self.store.path} and {self.remote.volume.place}" if self.remote is not None else str(self.store.path)

    def read_shared(self, found: Found) -> dict[str, Any]:
        """The Python values that all ranks share.

        Raises:
            CheckpointError: They cannot be read.
        """
        return self._values(found, found.manifest.shared_file)

    def read_rank(self, found: Found) -> dict[str, Any] | None:
        """This rank's own Python values; none if the checkpoint was written by fewer ranks.

        Raises:
            CheckpointError: They cannot be read.
        """
        name = found.manifest.rank_files.get(self.world.rank)
        return None if name is None else self._values(found, name)

    def open(self, found: Found) -> Found:
        """One checkpoint, verified as `newest_valid` does it; nothing is set aside. A collective.

        Args:
            found: From `CheckpointStore.list` or `look`.

        Raises:
            CheckpointError: It is damaged; the same on all ranks.
        """
        whole, reason = self._verify(found.path)
        self._agree(None if reason is None else f"{found.path} is damaged: {reason}", CheckpointError)
        return whole

    def check(self, found: Found, tensors: Mapping[str, Any], *, partial: bool = False) -> None:
        """Whether a checkpoint fits live tensors; changes nothing. A collective.

        Args:
            found: What `newest_valid` or `open` returned.
            tensors: Nested mappings of tensors, as they were saved.
            partial: Whether the checkpoint may hold tensors that are not asked for.

        Raises:
            StateMismatchError: Keys, shapes or dtypes differ on any rank.
        """
        self._agree(_differences(found, _joined(tensors), partial), StateMismatchError)

    def load(self, found: Found, tensors: Mapping[str, Any], *, partial: bool = False) -> None:
        """Fills live tensors. A collective.

        Args:
            found: What `newest_valid` or `open` returned.
            tensors: Nested mappings of live tensors, as they were saved.
            partial: Whether the checkpoint may hold tensors that are not asked for.

        Raises:
            StateMismatchError: Keys, shapes or dtypes differ on any rank; no tensor was changed on any rank.
            CheckpointError: A file could not be read any more; tensors may have been changed.
        """
        self.check(found, tensors, partial=partial)
        problem = None
        try:
            fill(found.path, self._record(found), _joined(tensors))
        except (DamagedError, OSError) as error:
            problem = f"{found.path}: {error}"
        self._agree(problem, CheckpointError)

    def _agree(self, problem: str | None, kind: type[CheckpointError]) -> None:
        problems = self.group.all_gather(problem)
        rank = next((rank for rank, text in enumerate(problems) if text), None)
        if rank is not None:
            where = f"rank {rank}: " if self.world.size > 1 else ""
            raise kind(f"{where}{problems[rank]}")

    def _candidates(self) -> list[Path]:
        """Rank 0 lists, so that all try the same: others may see an older state of a network drive."""
        if self.remote is not None:
            return tiers.candidates(self.remote)
        answer: list[Path] | str = ""
        if self.world.is_main:
            try:
                answer = [found.path for found in self.store.list()]
            except CheckpointError as error:
                answer = str(error)
        answer = self.group.broadcast(answer)
        if isinstance(answer, str):
            raise CheckpointError(answer)
        return answer

    def _verify(self, folder: Path) -> tuple[Found, str | None]:
        """One checkpoint and what this rank finds wrong in its share of it."""
        found = self.store.look(folder)
        if found.header is None:
            return found, found.damage
        world = self.world
        try:
            manifest, record = check_structure(folder, found.step)
            check_bytes(folder, manifest, rank=world.rank, size=world.size, local_size=world.local_size)
        except DamagedError as error:
            return found, str(error)
        self._records[folder] = record
        return replace(found, entries=entries_of(record)), None

    def _set_aside(self, damaged: list[tuple[Found, str]]) -> None:
        self.rejected = []
        if self.world.is_main:
            for found, reason in damaged:
                moved = None
                if self.remote is not None and not found.path.exists():  # it lies there only, and is marked there
                    self.rejected.append(Rejected(found.path, None, reason))
                    continue
                try:
                    moved = self.store.set_aside(found, reason)
                    log.warning("%s is damaged and was set aside as %s: %s", found.path, moved, reason)
                except (OSError, CheckpointError) as error:
                    log.warning("%s is damaged (%s) and could not be set aside: %s", found.path, reason, error)
                self.rejected.append(Rejected(found.path, moved, reason))
            if self.remote is not None:
                self.remote.mark_damaged()
        self.rejected = self.group.broadcast(self.rejected)

    def _record(self, found: Found) -> Metadata:
        if found.path not in self._records:
            self._records[found.path] = check_structure(found.path, found.step)[1]
        return self._records[found.path]

    def _values(self, found: Found, name: str) -> dict[str, Any]:
        try:
            data = files.read(found.path / name)
            _check_sums(name, data, found.manifest.files[name])
            return load_values(name, data)
        except CheckpointError as error:
            raise CheckpointError(f"{found.path}: {error}") from error


def _check_sums(name: str, data: bytes, record: FileRecord) -> None:
    if files.sums_of(data) != record.crc32 or len(data) != record.size:
        raise DamagedError(f"{name} has changed since it was verified")


def _joined(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {".".join(path): tensor for path, tensor in flatten(tensors).items()}


def _differences(found: Found, live: Mapping[str, torch.Tensor], partial: bool) -> str | None:
    """What does not fit between a checkpoint and live tensors, as a message; none if all fits."""
    lines = [f"  missing in the checkpoint: {key} {_kind(_of(live[key]))}" for key in live if key not in found.entries]
    if not partial:
        unused = [key for key in found.entries if key not in live]
        lines += [f"  only in the checkpoint: {key} {_kind(found.entries[key])}" for key in unused]
    for key in live:
        stored = found.entries.get(key)
        if stored is not None and stored != _of(live[key]):
            lines.append(f"  different: {key} is {_kind(stored)} in the checkpoint and {_kind(_of(live[key]))} here")
    if not lines:
        return None
    more = [f"  … and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "\n".join(
        [
            f"The checkpoint {found.path} is whole but does not fit the state of this run:",
            *lines[:LISTED],
            *more,
            "Nothing was loaded. Use the model and optimizer of the run that wrote it, or another run.name.",
        ]
    )


def _of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _kind(entry: tuple[torch.Size, torch.dtype]) -> str:
    shape, dtype = entry
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
