"""Ranks, process groups and agreement between ranks.

Guarantee: every wait is bounded, and an error names the ranks that did not come. With one process there is no process
group at all and every agreement is trivially this rank's own value.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from framework.errors import DistributedError, FrameworkError

T = TypeVar("T")


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
        DistributedError: `cuda` was asked for and there is none, or the ranks did not join in time.
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
    if world.size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        try:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))
        except Exception as error:
            raise DistributedError(
                f"Rank {world.rank} of {world.size} could not join the others within {timeout_seconds:g} s: {error}"
            ) from error
    return world


def leave() -> None:
    """Leaves the process group, if there is one. Never waits for other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
        self.handle: dist.ProcessGroup | None = None
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
            assert isinstance(group, dist.ProcessGroup)
            self.handle = group

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

    def barrier(self, timeout_seconds: float) -> None:
        """Waits until all ranks are here.

        Raises:
            DistributedError: Some are not here in time; the message names them.
        """
        if self.handle is None:
            return
        wait = datetime.timedelta(seconds=timeout_seconds)
        self._bounded(lambda: dist.monitored_barrier(self.handle, timeout=wait, wait_all_ranks=True))

    def _bounded(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise DistributedError(f"Rank {self.world.rank}: the ranks did not agree ({self.name}): {error}") from error
