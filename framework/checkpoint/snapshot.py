"""The state of one step, taken while the training goes on.

Guarantee: what a snapshot holds are the values at its safe point, or it says which tensor changed too early and is no
snapshot. What anything but an update may change (buffers, frozen weights, counters) is copied at once. What only an
update changes (trained weights, moments, averages) is copied beside the next forward and backward; `fence` makes
sure that it is copied before it changes, and is called before every update, by a hook of torch's optimizers too, so
that one that steps inside of backward is safe. Changes that torch does not count (`.data`, numpy) are found by a rehearsal that compares all bytes once, and
later by samples; they call for `trainer.fence()`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from framework.checkpoint import compat, sameness, staging
from framework.checkpoint.image import Image
from framework.checkpoint.plan import Flat, Layout, part_of
from framework.checkpoint.sameness import Samples, Versions
from framework.checkpoint.staging import Copying, DeviceCopying, Pair
from framework.distributed import World
from framework.errors import CheckpointError

log = logging.getLogger(__name__)

AUTO, ON, OFF = "auto", "on", "off"
OVERLAPS = (AUTO, ON, OFF)
LISTED = 5  # keys named in one message


def has_spare_core(world: World) -> bool:
    """Whether a copying thread finds a core, or a device copies by itself."""
    return world.device.type == "cuda" or len(os.sched_getaffinity(0)) > world.local_size * torch.get_num_threads()


class Snapshot:
    """One state on its way into the memory.

    Args:
        copying: Copies from CPU memory that may go on.
        device: Copies from CUDA devices that may go on.
        marks: Events of copies that the compute streams make.
        versions: The counters of what may not change before it is copied.
        keys: The key of each counter.
        samples: Some values of the same.
    """

    def __init__(
        self,
        copying: Copying,
        device: DeviceCopying | None,
        marks: Sequence[Any],
        versions: Versions,
        keys: list[str],
        samples: Samples,
    ) -> None:
        self.changed: list[str] = []
        self.hidden: list[str] = []  # those among them whose changes torch did not count
        self.waited = 0.0  # seconds that the fence held up the step loop
        self._copying = copying
        self._device = device
        self._marks = marks
        self._versions = versions
        self._keys = keys
        self._samples = samples
        self._lock = threading.Lock()
        self._is_checked = False

    def fence(self) -> None:
        """Returns when the tensors may change."""
        began = time.perf_counter()
        self._copying.finish()
        if self._device is not None:
            self._device.hold_compute()
        self._check()
        self.waited += time.perf_counter() - began

    def finish(self) -> None:
        """Waits until all bytes are in memory. For the thread that writes them.

        Raises:
            CheckpointError: A tensor could not be copied, or changed before it was; the message names it.
        """
        self._copying.finish()
        for event in self._marks:
            event.synchronize()
        if self._device is not None:
            self._device.finish()
        self._check()
        if self._copying.error is not None:
            error = self._copying.error
            raise CheckpointError(f"the state could not be copied: {type(error).__name__}: {error}") from error
        if self.changed:
            raise CheckpointError(
                f"{_named(self.changed)} changed before the update that should change it, while it was being copied; "
                f"from the next save on it is copied at once. Call trainer.fence() before changing weights by hand."
            )

    def _check(self) -> None:
        """Once, and before the update: later changes are rightful."""
        with self._lock:
            if not self._is_checked:
                self._is_checked = True
                counted = [self._keys[index] for index in self._versions.changed()]
                sampled = self._samples.changed()
                self.hidden = [key for key in sampled if key not in counted]
                self.changed = [*counted, *self.hidden]


class Snapshots:
    """Takes one snapshot at a time into one memory.

    Args:
        world: This process among all.
        overlap: `on`, `off`, or `auto`: on where there is a core to spare.
    """

    def __init__(self, world: World, overlap: str = AUTO) -> None:
        self.image = Image()
        self.is_overlapped = overlap == ON or (overlap == AUTO and has_spare_core(world))
        self._flat: Flat | None = None
        self._settled: Collection[str] = ()
        self._early: list[staging.Piece] = []
        self._late: list[staging.Piece] = []
        self._late_on_device: list[staging.Piece] = []
        self._devices: list[torch.device] = []  # of what is copied at once
        self._watched: dict[str, torch.Tensor] = {}
        self._copies: dict[str, list[Pair]] = {}
        self._streams: dict[torch.device, Any] = {}
        self._samples: list[tuple[str, torch.Tensor]] = []
        self._taken = 0
        self._then = Versions(())  # at the beginning of a rehearsal
        self._lock = threading.RLock()
        self._unsettled: set[str] = set()  # keys that were seen to change between updates
        self._needs_rehearsal = False
        self._running: Snapshot | None = None
        self._rehearsing = False
        self._hook: Any = None

    def build(self, flat: Flat, layout: Layout, settled: Collection[str], *, pinned: bool) -> None:
        """Lays out the memory for a state; does nothing if it is laid out for it.

        Args:
            flat: The live tensors.
            layout: What this rank writes.
            settled: Keys of tensors that nothing but an update changes.
            pinned: Whether tensors come from CUDA devices.
        """
        is_known = layout is self.image.layout and (settled is self._settled or settled == self._settled)
        if flat is self._flat and is_known:
            return
        self._flat = None
        if not is_known:
            self._needs_rehearsal = self.is_overlapped and bool(settled)
        self.image.use(layout, pinned=pinned)
        self._settled = settled
        self._sort(flat)
        self._flat = flat

    def _sort(self, flat: Flat) -> None:
        """Pairs of memory and live tensor, by when they are copied."""
        settled = set(self._settled) - self._unsettled if self.is_overlapped else set()
        # what shares memory with something unsettled is not settled either
        settled -= {owner for alias, owner in flat.aliases.items() if alias not in settled}
        unsettled = {_memory(live) for key, live in flat.tensors.items() if key not in settled}
        settled -= {key for key in settled if key in flat.tensors and _memory(flat.tensors[key]) in unsettled}
        early: list[Pair] = []
        late: dict[torch.device, list[Pair]] = {}
        self._watched, self._copies = {}, {}
        for entry, target in self.image.targets:
            live = flat.tensors[entry.key]
            source = part_of(live, entry)
            if entry.key not in settled or not sameness.is_counted(source):
                early.append((target, source))
                continue
            late.setdefault(source.device, []).append((target, source))
            self._watched[entry.key] = compat.local_part(live).detach()
            self._copies.setdefault(entry.key, []).append((target, source))
        self._devices = sorted({source.device for _, source in early if source.is_cuda}, key=str)
        self._early = [piece for group in _by_device(early) for piece in staging.cut(group)]
        here = late.pop(torch.device("cpu"), [])
        self._samples = [
            (key, live.view(-1)) for key, pairs in self._copies.items() for _, live in pairs if _is_flat(live)
        ]
        self._late = staging.cut(here)
        self._late_on_device = [piece for pairs in late.values() for piece in staging.cut(pairs)]

    def rehearse(self) -> None:
        """Copies everything, to be compared at the next fence: a state whose changes torch does not count is found.

        Only the first time that a state is laid out, and only where copies overlap.
        """
        if self._needs_rehearsal and self._running is None and self._copies:
            self._take_at_once()

    def take(self) -> Snapshot:
        """Takes the state as it is now; what is settled may still be copied when this returns.

        Raises:
            RuntimeError: A tensor could not be copied.
        """
        self.fence()
        if self._needs_rehearsal and self._copies:  # this one is the rehearsal
            return self._take_at_once()
        staging.copy(self._early)
        device = DeviceCopying(self._late_on_device, self._streams) if self._late_on_device else None
        versions = Versions(list(self._watched.values()))
        self._taken += 1
        snapshot = Snapshot(
            Copying(self._late), device, staging.mark(self._devices), versions, list(self._watched),
            Samples(self._samples, self._taken),
        )  # fmt: skip
        if self._watched:
            self._run(snapshot)
        return snapshot

    def _take_at_once(self) -> Snapshot:
        staging.copy([*self._early, *self._late, *self._late_on_device])
        devices = {piece[1][0].device for piece in self._late_on_device} | set(self._devices)
        self._then = Versions(list(self._watched.values()))
        snapshot = Snapshot(Copying(()), None, staging.mark(devices), Versions(()), [], Samples((), 0))
        self._rehearsing = True
        self._run(snapshot)
        return snapshot

    def fence(self, *, before_update: bool = False) -> None:
        """Returns when the live tensors may change. Costs nothing where no snapshot is under way.

        Args:
            before_update: Whether an update comes next; a rehearsal proves something only then.
        """
        if self._running is None:
            return
        with self._lock:  # optimizers may step in several threads: all wait until the copies are made
            snapshot = self._running
            if snapshot is None:
                return
            try:
                self._end(snapshot, before_update)
            finally:
                self._running = None

    def _end(self, snapshot: Snapshot, before_update: bool) -> None:
        if self._rehearsing:
            self._rehearsing = False
            if before_update:
                self._compare(snapshot)
            return
        snapshot.fence()
        if snapshot.changed:
            self._unsettle(snapshot.changed, snapshot.hidden)

    def release(self) -> None:
        """Gives the memory back."""
        self.fence()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.image.release()
        self._flat = None
        self._early, self._late, self._late_on_device = [], [], []
        self._watched, self._copies, self._samples = {}, {}, []

    def _run(self, snapshot: Snapshot) -> None:
        self._running = snapshot
        if self._hook is None:  # torch cannot take a hook away while it calls it, so it stays
            self._hook = register_optimizer_step_pre_hook(_fence_of(weakref.ref(self)))

    def _compare(self, snapshot: Snapshot) -> None:
        """Ends a rehearsal: whatever differs from its copy is copied at once from now on."""
        self._needs_rehearsal = False
        snapshot.finish()
        if changed := sameness.differing(self._copies):
            counted = {list(self._watched)[index] for index in self._then.changed()}
            self._unsettle(changed, [key for key in changed if key not in counted])

    def _unsettle(self, keys: list[str], hidden: Sequence[str]) -> None:
        """From now on these are copied at once; all are, where changes are made that torch does not count."""
        if hidden:
            self.is_overlapped = False
            log.warning(
                "%s changes between updates in a way that torch does not count (.data, numpy); saves copy everything at "
                "once from now on, which holds up the step for that long",
                _named(keys),
            )
        else:
            log.warning(
                "%s changes between updates; saves copy it at once, which holds up the step for that long", _named(keys)
            )
        self._unsettled |= set(keys)
        self._flat = None  # sorted anew by the next `build`


def _fence_of(snapshots: weakref.ref[Snapshots]) -> Callable[..., None]:
    def fence(*_: object) -> None:
        live = snapshots()
        if live is not None:
            live.fence(before_update=True)

    return fence


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """What two tensors share if one may lie within the other."""
    part = compat.local_part(tensor)
    return part.device, part.untyped_storage().data_ptr()


def _is_flat(live: torch.Tensor) -> bool:
    return live.device.type == "cpu" and live.is_contiguous()


def _by_device(pairs: list[Pair]) -> list[list[Pair]]:
    groups: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair[1].device, []).append(pair)
    return list(groups.values())


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
    return ", ".join(keys[:LISTED]) + more
