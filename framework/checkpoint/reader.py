"""Finds the newest checkpoint that is whole, and loads it.

Guarantee: everything is verified, by all ranks together, before anything is changed: on disk damaged checkpoints are
set aside only once a good one is found, and a live tensor is written only when keys, shapes and dtypes fit. What can
only not be read now is passed over and stays where it is. No code from a checkpoint runs. Every rank gets the same
verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata

from framework.checkpoint import files
from framework.checkpoint.commit import load_values
from framework.checkpoint.files import DamagedError, FileRecord, UnreadableError
from framework.checkpoint.fill import fill, torn
from framework.checkpoint.manifest import Manifest
from framework.checkpoint.plan import flatten
from framework.checkpoint.record import entries_of
from framework.checkpoint.remote import tiers
from framework.checkpoint.remote.tier import RemoteTier
from framework.checkpoint.store import CheckpointStore, Found
from framework.checkpoint.verify import check_bytes, check_structure
from framework.distributed import Group, World
from framework.errors import CheckpointError, StateMismatchError
from framework.speaking import count_text

log = logging.getLogger(__name__)
LISTED = 20  # differences named in one message


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that was damaged, or could not be read.

    Args:
        path: Where it was.
        moved_to: Where it lies now; none if it was not or could not be moved.
        reason: What is wrong with it.
    """

    path: Path
    moved_to: Path | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What one rank, or all of them, found wrong with a checkpoint.

    Args:
        reason: What it is.
        kind: `damaged`: its bytes are wrong; `unreadable`: they could not be read; `fatal`: no other one is tried.
    """

    reason: str
    kind: Literal["fatal", "damaged", "unreadable"]


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

    def newest_valid(self, *, local_suffices: bool = False) -> Found | None:
        """The newest checkpoint whose every byte is right; damaged newer ones are set aside, with a reason file.

        Args:
            local_suffices: Whether what lies here is enough where the remote place cannot be reached: for a run that
                knows that it wrote it.

        Returns:
            The same on all ranks; none if nothing was ever published.

        Raises:
            CheckpointError: There are published checkpoints and none is whole. The message lists each path and
                reason; nothing was changed.
        """
        remote = self.remote
        try:
            return self._newest_valid()
        except CheckpointError as error:  # the same on all ranks
            if remote is None or not local_suffices:
                raise
            self.remote = None
            if (found := self._newest_valid()) is None:
                raise
            if self.world.is_main:
                log.warning("only the checkpoints in %s were looked at: %s", self.store.path, error)
            return found
        finally:
            self.remote = remote

    def _newest_valid(self) -> Found | None:
        passed_over: list[tuple[Found, _Verdict]] = []
        for folder in self._candidates():
            found, verdict = self._judge(folder)
            if verdict is None:
                self._set_aside(passed_over)
                return found
            passed_over.append((found, verdict))
        if not passed_over:
            return None
        lines = "\n".join(f"  {found.path}: {verdict.reason}" for found, verdict in passed_over)
        raise CheckpointError(
            f"None of {count_text(len(passed_over), 'checkpoint')} in {self._places()} is whole; nothing was changed:\n{lines}\n"
            f"Put a good copy back, or start anew with another run.name."
        )

    def _judge(self, folder: Path) -> tuple[Found, _Verdict | None]:
        """One candidate, and what is wrong with it on any rank; what is damaged here is fetched anew."""
        if self.remote is None:
            return self._verify_together(folder, with_values=True)
        if (reason := tiers.bring(self.remote, folder)) is not None:
            step = int(folder.name.removeprefix("step_"))
            return Found(folder, step, damage=reason), _Verdict(reason, "damaged")
        found, verdict = self._verify_together(folder, with_values=True)
        if verdict is not None and tiers.bring(self.remote, folder, is_thorough=True) is None:
            found, verdict = self._verify_together(folder, with_values=True)
        if verdict is not None and verdict.kind == "damaged":
            tiers.blame(self.remote, found, verdict.reason)
        return found, verdict

    def _verify_together(self, folder: Path, *, with_values: bool = False) -> tuple[Found, _Verdict | None]:
        """One checkpoint, and the worst of what the ranks find; it names the rank.

        Args:
            folder: Where it lies.
            with_values: Whether its Python values are to be used too.

        Raises:
            CheckpointError: A rank found what no other checkpoint helps against.
        """
        found, verdict = self._verify(folder, with_values)
        named = [(rank, one) for rank, one in enumerate(self.group.all_gather(verdict)) if one is not None]
        if not named:
            return found, None
        order = ("fatal", "damaged", "unreadable")
        rank, worst = min(named, key=lambda pair: order.index(pair[1].kind))
        reason = f"rank {rank}: {worst.reason}" if self.world.size > 1 else worst.reason
        if worst.kind == "fatal":
            raise CheckpointError(reason)
        return found, _Verdict(reason, worst.kind)

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
        whole, verdict = self._verify_together(found.path)
        if verdict is not None:
            problem = "is damaged" if verdict.kind == "damaged" else "cannot be read"
            raise CheckpointError(f"{found.path} {problem}: {verdict.reason}")
        return whole

    def check(self, found: Found, tensors: Mapping[str, Any], *, partial: bool = False) -> None:
        """Whether a checkpoint fits live tensors; changes nothing. A collective.

        Args:
            found: What `newest_valid` or `open` returned.
            tensors: Nested mappings of tensors, as they were saved.
            partial: Whether the checkpoint may hold tensors that are not asked for.

        Raises:
            StateMismatchError: Keys, shapes or dtypes differ on any rank, or tensors that share their memory here have
                different values in the checkpoint.
        """
        live = _joined(tensors)
        problem: CheckpointError | None = None
        try:
            text = differences(found.path, found.entries, live, partial=partial, advice=ADVICE)
            text = text or torn(found.path, self._record(found), live)
            problem = StateMismatchError(text) if text else None
        except Exception as error:  # every rank must hear of it, whatever it is
            problem = CheckpointError(f"{found.path}: {error}")
        agree(self.group, problem)

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
            fill(found.path, self._record(found), _joined(tensors), local_size=self.world.local_size)
        except Exception as error:  # every rank must hear of it, whatever it is
            problem = CheckpointError(f"{found.path}: {error}")
        agree(self.group, problem)

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

    def _verify(self, folder: Path, with_values: bool) -> tuple[Found, _Verdict | None]:
        """One checkpoint and what this rank finds wrong in its share of it."""
        found = Found(folder, -1)
        world = self.world
        try:
            found = self.store.look(folder)
            manifest, record = check_structure(folder, found.step)
            check_bytes(folder, manifest, rank=world.rank, size=world.size, local_size=world.local_size)
            if with_values:
                self._check_values(folder, manifest)
        except UnreadableError as error:
            return replace(found, header=None, damage=str(error)), _Verdict(str(error), "unreadable")
        except DamagedError as error:
            return replace(found, header=None, damage=str(error)), _Verdict(str(error), "damaged")
        except CheckpointError as error:  # of a later version, or the volume is gone
            return found, _Verdict(str(error), "fatal")
        except Exception as error:  # every rank must hear of it, whatever it is
            return found, _Verdict(f"{type(error).__name__}: {error}", "unreadable")
        self._records[folder] = record
        return replace(found, header=manifest, damage=None, entries=entries_of(record)), None

    def _check_values(self, folder: Path, manifest: Manifest) -> None:
        """Whether the Python values that this rank restores can be loaded without running code."""
        for name in {manifest.shared_file, manifest.rank_files.get(self.world.rank, manifest.shared_file)}:
            try:
                load_values(name, files.read(folder / name))
            except DamagedError:
                raise
            except CheckpointError as error:
                raise CheckpointError(
                    f"{folder}: {error} Or allow the class with torch.serialization.add_safe_globals before the run "
                    f"starts, as the run that wrote it did."
                ) from error

    def _set_aside(self, passed_over: list[tuple[Found, _Verdict]]) -> None:
        self.rejected = []
        if self.world.is_main:
            self.rejected = [self._put_away(found, verdict) for found, verdict in passed_over]
            if self.remote is not None:
                self.remote.mark_damaged()
        self.rejected = self.group.broadcast(self.rejected)

    def _put_away(self, found: Found, verdict: _Verdict) -> Rejected:
        path, reason = found.path, verdict.reason
        if self.remote is not None and not path.exists():  # it lies there only, and is marked there
            return Rejected(path, None, reason)
        if verdict.kind == "unreadable":
            log.warning("%s cannot be read and was passed over; it stays where it is: %s", path, reason)
            return Rejected(path, None, reason)
        try:
            moved = self.store.set_aside(found, reason)
        except (OSError, CheckpointError) as error:
            log.warning("%s is damaged (%s) and could not be set aside: %s", path, reason, error)
            return Rejected(path, None, reason)
        log.warning("%s is damaged and was set aside as %s: %s", path, moved, reason)
        return Rejected(path, moved, reason)

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


ADVICE = "Use the model and optimizer of the run that wrote it, or another run.name."


def agree(group: Group, problem: CheckpointError | None) -> None:
    """Raises the problem of any rank on all of them. A collective.

    Raises:
        CheckpointError: The problem of the first rank that has one, of the same class; it names the rank.
    """
    problems = group.all_gather(None if problem is None else (type(problem), str(problem)))
    for rank, one in enumerate(problems):
        if one is not None:
            kind, text = one
            raise kind(f"rank {rank}: {text}" if len(problems) > 1 else text)


def differences(
    path: Path,
    entries: Mapping[str, tuple[torch.Size, torch.dtype]],
    live: Mapping[str, torch.Tensor],
    *,
    partial: bool,
    advice: str,
) -> str | None:
    """What does not fit between a checkpoint and live tensors, as a message; none if all fits.

    Args:
        path: The checkpoint.
        entries: Shape and dtype of its tensors by joined key.
        live: The live tensors by joined key.
        partial: Whether the checkpoint may hold tensors that are not asked for.
        advice: What to do, in one sentence.
    """
    lines = [f"  missing in the checkpoint: {key} {_kind(_of(live[key]))}" for key in live if key not in entries]
    if not partial:
        unused = [key for key in entries if key not in live]
        lines += [f"  only in the checkpoint: {key} {_kind(entries[key])}" for key in unused]
    for key in live:
        stored = entries.get(key)
        if stored is not None and stored != _of(live[key]):
            lines.append(f"  different: {key} is {_kind(stored)} in the checkpoint and {_kind(_of(live[key]))} here")
    if not lines:
        return None
    more = [f"  … and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "\n".join(
        [
            f"The checkpoint {path} is whole but does not fit the state of this run:",
            *lines[:LISTED],
            *more,
            f"Nothing was loaded. {advice}",
        ]
    )


def _of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _kind(entry: tuple[torch.Size, torch.dtype]) -> str:
    shape, dtype = entry
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
