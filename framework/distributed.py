"""Ranks, process groups and agreement between ranks.

Guarantee: every wait is bounded, and an error names the ranks that did not come where that can be known. With one
process there is no process group at all and every agreement is trivially this rank's own value.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from framework import launcher
from framework.ending import Background
from framework.errors import DistributedError, FrameworkError
from framework.identity import Identity

T = TypeVar("T")

STORE_SECONDS = 10.0  # within which a store that is alive answers, on a machine that is busy
LOOK_SECONDS = 0.5  # between two looks at whether ranks of this host still live
LEAVE_SECONDS = 5.0  # for calls of other threads, whose own bounds have passed by then
_ALL, _LATE, _GONE = "all", "late", "gone"


@dataclass(frozen=True, slots=True)
class World:
    """This process among all processes of the run.

    Args:
        rank: 0 to `size - 1`.
        size: Number of ranks.
        local_rank: Rank among the processes of this host.
        local_size: Number of processes on this host.
        device: Where this rank computes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_size() -> int:
    """The number of ranks as the launcher gave it, without joining them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's rank as the launcher gave it, without joining."""
    return int(os.environ.get("RANK", "0"))


def join(device: str = "auto", timeout_seconds: float = 600.0) -> World:
    """Joins the ranks that a launcher such as torchrun started; with one process only picks the device.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_seconds: Bound of the join and of every collective of the default group.

    Raises:
        DistributedError: `cuda` was asked for and there is none, the ranks did not join in time, or the launcher that
            started this one has died.
    """
    use_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if use_cuda and not torch.cuda.is_available():
        raise DistributedError(
            "trainer.device=cuda, but torch finds no CUDA device here. Use trainer.device=auto or cpu."
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(place)
    world = World(rank(), world_size(), local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), place)
    _flights.open()
    if world.size > 1 and not dist.is_initialized():
        bound = datetime.timedelta(seconds=timeout_seconds)

        def start() -> None:
            if use_cuda:
                torch.cuda.set_device(place)  # which is each thread's own
            dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=bound)

        launcher.within(start, timeout_seconds, "joining the others")
    return world


def leave() -> None:
    """Leaves the process group, if there is one. Waits for other ranks only where a thread of this one still does.

    A group that is taken away from under a thread aborts the process, so one that is in use after `LEAVE_SECONDS` stays.
    From now on a thread that begins a call of a `Group` gets an error.
    """
    if dist.is_initialized() and _flights.close(LEAVE_SECONDS):
        dist.destroy_process_group()


class _Flights:
    """How many calls of groups are under way, in all threads."""

    def __init__(self) -> None:
        self._number = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            if self._is_closed:
                raise DistributedError(
                    f"Rank {rank()} is leaving the others; what it still began for them is given up."
                )
            self._number += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._number -= 1
            self._changed.notify_all()

    def open(self) -> None:
        """Lets calls begin."""
        with self._changed:
            self._is_closed = False

    def close(self, seconds: float) -> bool:
        """Lets none begin; whether none is under way any more, within some seconds."""
        with self._changed:
            self._is_closed = True
            return self._changed.wait_for(lambda: self._number == 0, timeout=seconds)


_flights = _Flights()


class Group:
    """Agreement between all ranks over a gloo group of its own, for Python values.

    Every method is a collective: all ranks call it, in the same order.

    Args:
        world: This process among all.
        timeout_seconds: Bound of each call.
        name: What the group is for, for error messages.
    """

    def __init__(self, world: World, *, timeout_seconds: float, name: str) -> None:
        self.world = world
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.handle: dist.ProcessGroup | None = None
        if world.size > 1:
            bound = datetime.timedelta(seconds=timeout_seconds)

            def make() -> object:
                with _flights:
                    return dist.new_group(backend="gloo", timeout=bound)

            group = launcher.within(make, timeout_seconds + STORE_SECONDS, f"agreeing on the group '{name}'")
            assert isinstance(group, dist.ProcessGroup)
            self.handle = group
            self._roll = _RollCall(world, f"roll/{group.group_name}")

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.handle is None:
            return [value]
        values: list[Any] = [None] * self.world.size
        self._bounded(lambda: dist.all_gather_object(values, value, group=self.handle))
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.handle is None:
            return value
        box: list[Any] = [value]
        self._bounded(lambda: dist.broadcast_object_list(box, src=0, group=self.handle))
        return box[0]  # type: ignore[no-any-return]

    def on_main(self, work: Callable[[], T]) -> T:
        """Runs something on rank 0 alone; every rank gets its value, or its error raised.

        Raises:
            FrameworkError, OSError: What `work` raised on rank 0.
        """
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.world.is_main:
            try:
                outcome = (work(), None)
            except (FrameworkError, OSError) as error:
                outcome = (None, error)
        value, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]

    def together(self, what: str, seconds: float) -> None:
        """Waits until all ranks are here, without a collective: whoever is frozen or gone holds nobody up for longer.

        All ranks that are here learn the same outcome at about the same time. One rank alone is always together.

        Args:
            what: What they are about to do, for the message: "saving step 30".
            seconds: How long to wait for the last one.

        Raises:
            DistributedError: Some did not come in time; the message names them.
        """
        if self.handle is None:
            return
        with _flights:
            kind, missing = self._roll.meet(seconds)
        if kind == _GONE:
            raise DistributedError(
                f"{_ranks(missing)} did not come while {what}: the process has ended. Look at its log, and whether its "
                f"host ran out of memory."
            )
        if self.world.rank in missing:
            raise DistributedError(
                f"rank {self.world.rank}, this one, came later than {seconds:g} s after the first while {what}; "
                f"the others did not wait longer. Its host is overloaded, or the process was stopped for a while."
            )
        if missing:
            raise DistributedError(
                f"{_ranks(missing)} did not come within {seconds:g} s while {what}{self._roll.hint}. "
                f"Such a rank hangs, is stopped, or is gone: look at its log and its host."
            )

    def missing(self) -> str:
        """Who has not come to the call that this rank is in, possibly in another thread: "rank 1 did not come".

        Empty if all have, or if that is not known. Waits for the store alone, not for ranks.
        """
        ranks = [] if self.handle is None else self._roll.absent()
        return f"{_ranks(ranks)} did not come{self._roll.hint}" if ranks else ""

    def _bounded(self, collective: Any) -> None:
        self._roll.arrive()
        try:
            with _flights:
                collective()
        except RuntimeError as error:
            who = self.missing()
            raise DistributedError(
                f"Rank {self.world.rank}: the ranks did not agree ({self.name}): {who + ': ' if who else ''}{error}"
            ) from error


class _RollCall:
    """Who came how far, by keys in the store over which the ranks joined.

    Guarantee: no rank waits for another longer than it says. The store itself may live in a rank that is frozen, so
    whatever waits for its answer runs in a thread that can be left behind.

    Args:
        world: This process among all.
        prefix: Of the keys; the same on all ranks, and used by nobody else.

    Attributes:
        hint: What else is known of those that the last answer named.
    """

    def __init__(self, world: World, prefix: str) -> None:
        # a connection of its own: one that hangs must not hold the lock of the one that torch uses
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._world = world
        self._prefix = prefix
        self._count = 0
        self._last_meeting = 0
        self.hint = ""
        self._tell("who", Identity.own().text)

    def arrive(self) -> None:
        """Says that this rank has come to its next call. Does not wait for an answer."""
        self._count += 1
        self._tell("at", str(self._count))

    def absent(self) -> list[int]:
        """Ranks that have not come to the call that this rank is in, as far as is known."""
        return self._asked(lambda: (_LATE, self._behind(self._count)), STORE_SECONDS)[1]

    def meet(self, seconds: float) -> tuple[str, list[int]]:
        """Waits until all ranks have come to this call; the verdict and those that did not, the same on all ranks."""
        self.arrive()
        return self._asked(lambda: self._meet(self._count, seconds), seconds + STORE_SECONDS)

    def _tell(self, what: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):  # without a store nobody can be named; the call itself still works
            self._store.set(f"{self._prefix}/{what}/{self._world.rank}", value)

    def _told(self, what: str, rank: int) -> str:
        key = f"{self._prefix}/{what}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _asked(self, work: Callable[[], tuple[str, list[int]]], seconds: float) -> tuple[str, list[int]]:
        """What `work` finds out; the rank that holds the store, if the store does not answer."""
        answers: list[tuple[str, list[int]]] = []
        self.hint = ""

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone with the process that held it
                answers.append(work())

        thread = Background(ask, "roll-call")
        thread.start()
        thread.join(seconds)
        if answers:
            return answers[0]
        is_with_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.hint = f" (the store of {'the launcher' if is_with_launcher else 'rank 0'} does not answer)"
        return _LATE, [0] if self._world.rank and not is_with_launcher else self._others()

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank != self._world.rank]

    def _meet(self, number: int, seconds: float) -> tuple[str, list[int]]:
        now = time.monotonic()
        deadline, look, pause = now + seconds, now + LOOK_SECONDS, 0.0002
        key = f"{self._prefix}/{number}"
        before, self._last_meeting = f"{self._prefix}/{self._last_meeting}", number
        if self._store.add(f"{key}/count", 1) == self._world.size:
            for name in ("count", "verdict"):  # all have left the meeting before
                self._store.delete_key(f"{before}/{name}")
            return self._decide(key, _ALL, [])
        while not self._store.check([f"{key}/verdict"]):
            now = time.monotonic()
            if now >= deadline:
                return self._decide(key, _LATE, self._behind(number))
            if now >= look:
                look = now + LOOK_SECONDS
                gone = [rank for rank in self._behind(number) if Identity(self._told("who", rank)).has_ended]
                if gone:
                    return self._decide(key, _GONE, gone)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return _parse(self._store.get(f"{key}/verdict"))

    def _decide(self, key: str, kind: str, ranks: list[int]) -> tuple[str, list[int]]:
        """The first verdict counts, whoever comes to another one."""
        verdict = f"{kind} {','.join(map(str, ranks))}" if ranks else _ALL
        return _parse(self._store.compare_set(f"{key}/verdict", "", verdict))

    def _behind(self, number: int) -> list[int]:
        """Ranks that have not come as far as their call with this number."""
        return [rank for rank in self._others() if int(self._told("at", rank) or 0) < number]


def _parse(verdict: bytes) -> tuple[str, list[int]]:
    kind, _, names = verdict.decode().partition(" ")
    return kind, [int(name) for name in names.split(",")] if names else []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
