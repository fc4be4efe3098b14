"""Saves while the training goes on.

Guarantee: when `start` returns, everything but an update may change the live tensors; `fence` returns when an update
may. One thread then writes, commits and uploads; the step loop learns the outcome from `poll`, the same on every rank.
One save is in flight; every wait is bounded.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from framework.checkpoint import compat, files
from framework.checkpoint.commit import IDLE, Committer, Save, dump_values, load_values
from framework.checkpoint.content import SaveHeader, SaveResult, TrainState
from framework.checkpoint.manifest import make_tag, rank_name, shard_name, shared_name
from framework.checkpoint.plan import Flat, Plan, agree, describe
from framework.checkpoint.retention import Keep
from framework.checkpoint.snapshot import AUTO, Snapshot, Snapshots
from framework.checkpoint.store import CheckpointStore
from framework.distributed import Group, World
from framework.ending import Background
from framework.errors import CheckpointError, FrameworkError

log = logging.getLogger(__name__)

# of the writing thread, so that the training goes before it where all cores are busy; 10 made saves 3.6 times as long
NICE = 5


class Remote(Protocol):
    """Where committed checkpoints are sent. Called in the writing thread, on all ranks."""

    phase: str  # what it is doing, for messages

    def push(self, result: SaveResult) -> SaveResult:
        """Sends a checkpoint that is committed here; the outcome of both, the same on all ranks. A collective."""

    def retain(self, keep: Keep) -> object:
        """Deletes there, and here, what is not to be kept. On rank 0."""

    def sees(self, rank: int) -> bool:
        """Whether rank 0 sees the files that a rank writes here."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the others before a save."""

    step: int
    is_changed: bool
    error: str | None


class CheckpointWriter:
    """Writes the checkpoints of one attempt.

    `prepare` and `start` are collectives: all ranks call them, at the same step.

    Args:
        store: Where to.
        world: This process among all.
        group: A group of its own: nothing else may use it.
        run: Name of the run.
        attempt: Number of this attempt, from 1.
        token: Fencing token of this attempt.
        is_owner: Whether this attempt still owns the run. Asked on rank 0 right before it publishes.
        timeout_seconds: Longest wait for the save in flight, in `start` and `close`.
        keep: What to keep after a commit; none keeps all.
        remote: Where to send what is committed, if anywhere.
        overlap: Whether copying goes on beside the training: `on`, `off`, or `auto`: where there is a core to spare.
    """

    def __init__(
        self,
        store: CheckpointStore,
        world: World,
        group: Group,
        *,
        run: str,
        attempt: int,
        token: str,
        is_owner: Callable[[], bool],
        timeout_seconds: float,
        keep: Keep | None = None,
        remote: Remote | None = None,
        overlap: str = AUTO,
    ) -> None:
        self.store = store
        self.world = world
        self.group = group
        self.attempt = attempt
        self.token = token
        self.timeout_seconds = timeout_seconds
        self.keep = keep
        self.remote = remote
        self._committer = Committer(store, group, run=run, attempt=attempt, token=token, is_owner=is_owner)
        if remote is not None:
            self._committer.sees = remote.sees
        self._sequence = 0
        self._plan: Plan | None = None
        self._signature: object = None
        self._flat: Flat | None = None
        self._snapshots = Snapshots(world, overlap)
        self._thread: threading.Thread | None = None
        self._results: collections.deque[SaveResult] = collections.deque()

    def prepare(self, state: TrainState) -> None:
        """Plans, reserves and touches the memory, and proves that the target can be written.

        Call it again when the state has grown (the moments of an optimizer exist after its first step): what is
        built here is not paid for by the first save.

        Raises:
            CheckpointError: The state cannot be saved, or the target cannot be written; the same on all ranks.
        """
        self._join()
        flat = self._agree(state, step=-1)
        error = None
        try:
            compat.self_test()
            for name, values in (("shared", state.shared), ("rank", state.rank)):
                load_values(name, dump_values(values))
            self._probe()
            self._build(flat, state)
            self._snapshots.rehearse()
        except CheckpointError as problem:
            error = str(problem)
        except Exception as problem:  # every rank must hear of it, whatever it is
            error = f"{type(problem).__name__}: {problem}"
        _raise_any(self.group.all_gather(error))

    def start(self, state: TrainState, header: SaveHeader) -> None:
        """Takes the state and begins to write it. Waits first for a save that is still in flight.

        Call `fence` before anything changes what `state.settled` names.

        What goes wrong on one rank while copying or writing is a failed `SaveResult` on all ranks, not an exception.

        Raises:
            CheckpointError: The state cannot be saved, the ranks save different steps, or the save in flight does not
                end in time.
            DistributedError: Another rank did not come.
        """
        self._join()
        began = time.monotonic()
        captured = time.time()
        self.group.together(f"beginning to save step {header.step}", self.group.timeout_seconds)
        flat = self._agree(state, header.step)
        assert self._plan is not None
        tag = make_tag(self.attempt, self.token, self._sequence)
        self._sequence += 1
        save = Save(header, tag, self._plan, captured)
        snapshot = None
        try:
            self._build(flat, state)
            snapshot = self._snapshots.take()
            images = self._snapshots.image.files()
            save.shards = {shard_name(self.world.rank, n, tag): data for n, data in enumerate(images)}
            save.objects = {rank_name(self.world.rank, tag): dump_values(state.rank)}
            if self.world.is_main:
                save.objects[shared_name(tag)] = dump_values(state.shared)
        except Exception as problem:  # agreed to save: the other ranks must hear of it
            save.error = f"the state of step {header.step} could not be copied: {type(problem).__name__}: {problem}"
        save.stall_seconds = time.monotonic() - began
        self._thread = Background(lambda: self._persist(save, snapshot), "checkpoint")
        self._thread.start()

    def fence(self, *, before_update: bool = False) -> None:
        """Returns when the live tensors may change. Costs nothing where no copy is under way.

        Args:
            before_update: Whether an update comes next.
        """
        self._snapshots.fence(before_update=before_update)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> list[SaveResult]:
        """The saves that ended since the last call; never waits."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def wait(self, timeout: float) -> list[SaveResult]:
        """Waits for the save in flight, if there is one, and returns what ended since the last call.

        Args:
            timeout: Longest wait, in seconds.

        Raises:
            CheckpointError: It did not end in time; the message says what it is doing.
        """
        self._join(timeout)
        return self.poll()

    def close(self) -> None:
        """Waits for the save in flight at most `timeout_seconds` and gives the memory back. Closing twice is fine."""
        try:
            self._join()
        except CheckpointError as error:
            log.warning("%s", error)
            return
        self._snapshots.release()
        self._plan = self._flat = None
        self._signature = None

    def _join(self, timeout: float | None = None) -> None:
        if self._thread is None:
            return
        bound = self.timeout_seconds if timeout is None else timeout
        self._thread.join(bound)
        if self._thread.is_alive():
            raise CheckpointError(
                f"Rank {self.world.rank}: the save in flight did not end within {bound:g} s; it is "
                f"{self._phase}. Look at the storage, or allow more time."
            )
        self._thread = None

    @property
    def _phase(self) -> str:
        phase = self._committer.phase
        return self.remote.phase if phase == IDLE and self.remote is not None else phase

    def _agree(self, state: TrainState, step: int) -> Flat:
        """The plan for this state, the same on all ranks; made anew if the state of any rank has another structure."""
        flat = None
        error = None
        try:
            with _no_collection():
                flat = self._flat = describe(state.tensors, self._flat)
        except CheckpointError as problem:
            error = str(problem)
        is_changed = flat is None or self._plan is None or flat.signature != self._signature
        offers = self.group.all_gather(_Offer(step, is_changed, error))
        _raise_any([offer.error for offer in offers])
        if len({offer.step for offer in offers}) > 1:
            steps = ", ".join(f"rank {rank}: {offer.step}" for rank, offer in enumerate(offers))
            raise CheckpointError(f"The ranks save different steps ({steps}). All ranks must start a save together.")
        assert flat is not None
        if any(offer.is_changed for offer in offers):
            self._signature = None
            self._plan = agree(flat, self.group)
            self._committer.use(self._plan)
            self._signature = flat.signature
        return flat

    def _build(self, flat: Flat, state: TrainState) -> None:
        """Lays the memory out for the agreed plan, unless it is."""
        assert self._plan is not None
        is_cuda = self.world.device.type == "cuda"
        self._snapshots.build(flat, self._plan.layouts[self.world.rank], state.settled, pinned=is_cuda)

    def _probe(self) -> None:
        """Writes, forces and removes a small file in the target folder."""
        path = self.store.path / f".probe.{make_tag(self.attempt, self.token, 0)}.{self.world.rank}"
        try:
            self._committer.mounted.check()
            self.store.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            files.create(path, b"checkpoints go here")
            os.unlink(path)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints cannot be written to {self.store.path}: {error.strerror or error}. "
                f"Choose another run.dir, or make it a folder that this user may write."
            ) from error

    def _persist(self, save: Save, snapshot: Snapshot | None) -> None:
        """The body of the thread."""
        if snapshot is not None:
            try:
                snapshot.finish()
            except Exception as problem:  # every rank must hear of it, whatever it is
                save.error = save.error or f"step {save.header.step}: {problem}"
            save.stall_seconds += snapshot.waited
        save.staged = time.monotonic()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # threads have priorities of their own
        result = self._committer.persist(save)
        if result.committed and self.remote is not None:
            try:
                result = self.remote.push(result)
            except Exception as problem:  # a thread that ends without a word would be waited for
                result = replace(result, committed=False, error=f"it could not be sent on: {problem}")
        self._results.append(result)
        if result.committed and self.world.is_main:
            self._retain(result)

    def _retain(self, result: SaveResult) -> None:
        try:
            if result.local:
                self.store.prune(result.path, self.attempt)
            if self.keep is not None and self.remote is not None:
                self.remote.retain(self.keep)
            elif self.keep is not None:
                self.store.retain(self.keep, attempt=self.attempt, is_owner=self._committer.is_owner)
        except (OSError, FrameworkError) as error:
            log.warning("Old checkpoints in %s could not be deleted: %s", self.store.path, error)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Describing thousands of tensors makes enough small objects to start a full collection: 0.2 s of stall."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _raise_any(errors: list[str | None]) -> None:
    """Raises the errors of all ranks as one."""
    found = [(rank, error) for rank, error in enumerate(errors) if error]
    if not found:
        return
    if len(found) == len(errors) and len({error for _, error in found}) == 1:
        raise CheckpointError(found[0][1])
    raise CheckpointError("; ".join(f"rank {rank}: {error}" for rank, error in found))
