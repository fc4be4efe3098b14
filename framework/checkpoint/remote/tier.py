"""The remote tier of a run's checkpoints: a save counts when its upload is published.

Guarantee: remotely, too, a checkpoint exists when its `.metadata` does, which is put last, in one piece, after the size
of every other file was seen there and this attempt was found to own the run still. An error on any rank is heard by
all; the local copy stays, and the next try sends what is missing. Retention removes `.metadata` first, never the last
good copy, and a local copy only when it is not needed any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from framework.checkpoint import files
from framework.checkpoint.commit import IDLE
from framework.checkpoint.content import SaveResult
from framework.checkpoint.manifest import METADATA, Manifest, unseal
from framework.checkpoint.remote import claim, fetch
from framework.checkpoint.remote.homes import Homes, find_homes
from framework.checkpoint.remote.listing import MARK, Copy, Listing, parse
from framework.checkpoint.remote.retiring import retire
from framework.checkpoint.remote.tiers import BOTH, REMOTE, Candidate
from framework.checkpoint.remote.upload import rank_of, send
from framework.checkpoint.retention import Keep
from framework.checkpoint.store import CheckpointStore
from framework.distributed import Group
from framework.errors import CheckpointError, FrameworkError
from framework.volume import Volume, VolumeExists, VolumeUnsupported

log = logging.getLogger(__name__)
T = TypeVar("T")
Places = list[str]  # inside the class, `list` is its method
Copies = list[Copy]


@dataclass(frozen=True, slots=True)
class _Order:
    """What rank 0 tells all before an upload: the parts of a local checkpoint that tie it together."""

    metadata: bytes
    manifest_name: str
    manifest_data: bytes


class RemoteTier:
    """The checkpoints of one run in a volume that other hosts see.

    `probe`, `claim`, `push` and `push_again` are collectives; `list` and `retain` belong to rank 0.

    Args:
        volume: The place of this run, `<remote>/<run.name>`.
        group: The group of the writer: nothing else may use it while a save is under way.
        store: The local checkpoints.
        run: Name of the run.
        attempt: Number of this attempt, from 1.
        token: Fencing token of this attempt.
        keep_local: How many of the newest uploaded checkpoints keep their local copy; none: as many as are kept
            remotely. What is not uploaded stays until something newer is.
        is_owner: Whether this attempt still owns the run directory. Asked on rank 0 right before it publishes.

    Attributes:
        phase: What is being done, for messages.
        pending: The save whose upload failed last; none if nothing has to be made up for.
        listing: What lies in the place.
        known: What `tiers.candidates` found, by step, on rank 0.
        damaged: What is wrong with remote checkpoints that could not be used, by step.
        repaired: Local checkpoints that were damaged and made whole from here, with what was wrong.
    """

    def __init__(
        self,
        volume: Volume,
        group: Group,
        *,
        store: CheckpointStore,
        run: str,
        attempt: int,
        token: str,
        keep_local: int | None = None,
        is_owner: Callable[[], bool] = lambda: True,
    ) -> None:
        self.volume = volume
        self.group = group
        self.world = group.world
        self.store = store
        self.run = run
        self.attempt = attempt
        self.token = token
        self.keep_local = keep_local
        self.is_owner = is_owner
        self.phase = IDLE
        self.pending: SaveResult | None = None
        self.known: dict[int, Candidate] = {}
        self.damaged: dict[int, str] = {}
        self.repaired: list[tuple[Path, str]] = []
        self.listing = Listing(volume)
        self._homes: Homes | None = None
        self._can_be_exclusive = True

    # -- before the first step ---------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Proves on every rank that the place can be written, read and deleted from. A collective.

        Raises:
            CheckpointError: It cannot; the message names URL, rank and cause.
        """
        problem = None
        try:
            self.volume.probe()
        except (FrameworkError, OSError) as error:
            problem = str(error)
        answers = self.group.all_gather((self.volume.place, problem))
        rank = next((rank for rank, (_, text) in enumerate(answers) if text), None)
        if rank is not None:
            raise CheckpointError(
                f"Checkpoints cannot be kept in {answers[rank][0]} (rank {rank}): {answers[rank][1]} "
                f"Check the URL, the credentials and their rights, or leave the remote out."
            )
        self.homes()

    def homes(self) -> Homes:
        """Which ranks share a disk; found out once. A collective the first time."""
        if self._homes is None:
            self._homes = find_homes(self.group, self.store.path)
        return self._homes

    def sees(self, rank: int) -> bool:
        """Whether rank 0 sees the files that a rank writes here, as far as `homes` has found out."""
        return self._homes is None or self._homes.sees(rank)

    def claim(self) -> None:
        """Takes the place for this attempt; whoever had it neither publishes nor deletes any more. A collective.

        Called when training begins: whatever is to be resumed has been found and restored.

        Raises:
            CheckpointError: The place cannot be written.
        """
        before = self.on_main(lambda: claim.take(self.volume, self.run, self.attempt, self.token))
        if self.world.is_main:
            fetch.clear(self.store)
            if before is not None:
                level = logging.INFO if before.host == socket.gethostname() else logging.WARNING
                text = "%s: this attempt takes over from %s. If that one still runs, it saves there no more."
                log.log(level, text, self.volume.place, before)

    def check_claim(self) -> None:
        """Whether this attempt may publish and delete. On rank 0.

        Raises:
            CheckpointError: Another attempt owns the run directory or claimed the place.
            VolumeError: The place cannot be read.
        """
        if not self.is_owner():
            raise CheckpointError(
                f"superseded: another attempt owns the run directory now, so attempt {self.attempt} neither publishes "
                f"nor deletes in {self.volume.place}."
            )
        claim.check(self.volume, self.token)

    def on_main(self, work: Callable[[], T]) -> T:
        """Runs something on rank 0; every rank gets its value or its error. A collective.

        Raises:
            CheckpointError: What went wrong on rank 0.
        """
        value, problem = None, None
        if self.world.is_main:
            try:
                value = work()
            except Exception as error:  # every rank must hear of it, whatever it is
                problem = str(error) if isinstance(error, FrameworkError) else f"{type(error).__name__}: {error}"
        value, problem = self.group.broadcast((value, problem))
        if problem is not None:
            raise CheckpointError(problem)
        return value  # type: ignore[return-value]

    # -- saving ------------------------------------------------------------------------------------------------------

    def push(self, result: SaveResult) -> SaveResult:
        """Uploads and publishes a save that is committed locally. A collective; raises nothing.

        Args:
            result: Of the local commit, the same on all ranks.

        Returns:
            Committed only if it is published remotely. If not, `local` says whether the local copy is whole.
        """
        if not result.committed:
            return result
        began = time.monotonic()
        try:
            error = self._push(result)
        except (FrameworkError, OSError) as problem:
            error = str(problem)
        self.phase = IDLE
        seconds = time.monotonic() - began
        result = replace(result, upload_seconds=seconds, persist_seconds=result.persist_seconds + seconds)
        if error is not None:
            self.pending = result
            return replace(result, committed=False, error=error)
        self.pending = None
        return replace(result, tier=BOTH if result.local else REMOTE)

    def push_again(self) -> SaveResult | None:
        """Uploads what is missing of the save whose upload failed last. A collective.

        Returns:
            As of `push`; none if nothing has to be made up for, or the local copy is gone.
        """

        def still_here() -> SaveResult | None:
            pending = self.pending
            if pending is None:
                return None
            is_here = self.store.look(pending.path).header is not None if pending.local else _parts(pending.path)
            return pending if is_here else None

        try:
            self.pending = self.on_main(still_here)
        except FrameworkError as error:
            log.warning("the upload is not tried again: %s", error)
            return None
        return None if self.pending is None else self.push(self.pending)

    def _push(self, result: SaveResult) -> str | None:
        """What went wrong, the same on all ranks."""
        self.phase = f"reading {result.path}"
        order = self.on_main(lambda: self._order(result))
        manifest = Manifest.from_bytes(order.manifest_data)
        self.phase = f"uploading to {self.volume.shown(result.path.name)}"
        problem = None
        try:
            size, rank = self.world.size, self.world.rank
            mine = {name: record for name, record in manifest.files.items() if rank_of(name, size) == rank}
            send(self.volume, result.path.name, self.store.folder(result.step), mine)
        except Exception as error:  # every rank must hear of it, whatever it is
            problem = str(error) if isinstance(error, FrameworkError) else f"{type(error).__name__}: {error}"
        self.phase = f"waiting for the uploads of the other ranks to {self.volume.shown(result.path.name)}"
        answers = self.group.all_gather((self.volume.shown(result.path.name), problem))
        if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]:
            return f"the upload to {answers[0][0]} failed, the copy in {result.path} stays: {'; '.join(failed)}"
        self.phase = f"waiting for rank 0 to publish {self.volume.shown(result.path.name)}"
        self.on_main(lambda: self._publish(result.path.name, order, manifest))
        if not self.homes().is_shared:
            self._tidy(result.step)
        return None

    def _order(self, result: SaveResult) -> _Order:
        self.check_claim()
        source = result.path / METADATA if result.local else _parts(result.path)
        if source is None:
            raise CheckpointError(f"{result.path} is gone and cannot be uploaded.")
        metadata = files.read(source)
        name = unseal(metadata)[1].manifest
        data = files.read(result.path / name)
        parse(metadata, data, result.step)
        return _Order(metadata, name, data)

    def _publish(self, folder: str, order: _Order, manifest: Manifest) -> None:
        """Rank 0: sees that everything is there, then one put makes it a checkpoint."""
        self.volume.put(f"{folder}/{order.manifest_name}", order.manifest_data)
        there = {entry.name.partition("/")[2]: entry.size for entry in self.volume.list(folder)}
        wanted = {name: record.size for name, record in manifest.files.items()}
        for name, size in {**wanted, order.manifest_name: len(order.manifest_data)}.items():
            found = there.get(name)
            if found != size:
                found = self.volume.size(f"{folder}/{name}")  # a listing may be older
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise CheckpointError(
                    f"{self.volume.shown(f'{folder}/{name}')} {what} after its upload: not published."
                )
        if MARK in there:
            self.volume.delete(f"{folder}/{MARK}")
        is_new = self.volume.size(f"{folder}/{METADATA}") is None  # asked before the claim is: see `_put_last`
        self.check_claim()
        self._put_last(f"{folder}/{METADATA}", order.metadata, is_new=is_new)
        if self.volume.size(f"{folder}/{METADATA}") != len(order.metadata):
            raise CheckpointError(f"{self.volume.shown(f'{folder}/{METADATA}')} is not there after its upload.")

    def _put_last(self, name: str, metadata: bytes, *, is_new: bool) -> None:
        """Publishes; what another attempt has published there since this one looked stays, where the store can tell."""
        try:
            self.volume.put(name, metadata, exclusive=is_new and self._can_be_exclusive)
        except VolumeUnsupported:
            self._can_be_exclusive = False  # to ask may take as long as an outage is waited out: once is enough
            self.volume.put(name, metadata)
        except VolumeExists as error:
            if self.volume.read(name) != metadata:
                raise CheckpointError(
                    f"superseded: {self.volume.shown(name)} was published meanwhile by another attempt, and stays as it "
                    f"is. Stop one of the two runs, or give it another run.name."
                ) from error

    def _tidy(self, newest: int) -> None:
        """Removes parts of older saves where every host has its own disk; each leader does it for its own."""
        if self.homes().leaders[self.world.rank] != self.world.rank:
            return
        folders = sorted(path for path in self.store.path.glob("step_*") if path.is_dir() and not path.is_symlink())
        steps = [path for path in folders if path.name <= self.store.folder(newest).name]
        for folder in steps[: -max(1, self.keep_local or 1)]:
            if not self.world.is_main or not os.path.lexists(folder / METADATA):  # rank 0's whole ones: `retain`
                with contextlib.suppress(OSError):
                    os.unlink(folder / METADATA)
                shutil.rmtree(folder, ignore_errors=True)

    # -- what is there -----------------------------------------------------------------------------------------------

    def list(self) -> Copies:
        """The published checkpoints in the place, newest first; damaged ones are among them, with what is wrong.

        Raises:
            VolumeError: The place cannot be read.
            CheckpointError: One was written by a later version.
        """
        return self.listing.copies()

    def mark_damaged(self) -> None:
        """Leaves the reason beside each remote checkpoint that was found damaged, so that none is tried again."""
        for step, reason in self.damaged.items():
            with contextlib.suppress(FrameworkError):
                self.volume.put(f"{self.store.folder(step).name}/{MARK}", f"{reason}\n".encode())
        self.damaged = {}

    def retain(self, keep: Keep) -> Places:
        """Deletes what no rule keeps, in both tiers, while this attempt holds the claim. On rank 0.

        Args:
            keep: The rules; they count remote checkpoints.

        Returns:
            The places of what was deleted.

        Raises:
            CheckpointError: Another attempt claimed the place, or the run directory.
            VolumeError: The place cannot be read, or something could not be deleted.
        """
        self.phase = f"deleting what is not kept in {self.volume.place}"
        try:
            return retire(self, keep)
        finally:
            self.phase = IDLE


def _parts(folder: Path) -> Path | None:
    """The `.metadata` of a save whose parts lie on several disks: the newest that waits to be published."""
    waiting = [path for path in folder.glob(f"{METADATA}.*.tmp") if path.is_file()]
    return max(waiting, key=lambda path: path.name, default=None)
