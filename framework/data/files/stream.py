"""Files as a stream of local paths, for code that decodes them itself.

Guarantee: over all ranks and workers every file of an epoch comes once, in an order that depends on the seed and the
epoch alone; ranks need not agree on their number of workers. Rank and worker are read when an iteration begins. In a
loader of this package the loader says which files come, so that its position is exact.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data

from framework.data.files.feed import Files, active_feed
from framework.data.files.local_paths import KEPT
from framework.data.order import Order
from framework.errors import ConfigError, StateMismatchError

AHEAD = 256  # files that are announced before they are asked for
BLOCK = 512  # ids computed at once
SLOTS = 1024  # workers whose iterations are counted apart
_EPOCH, _POSITION, _FIRST_SLOT = 0, 1, 2  # places in what the processes share


class PathStream(torch.utils.data.IterableDataset[str]):
    """Local paths of the files of a `VolumeDataset`. Made by its `paths()`.

    Each rank takes every world-size-th file of the epoch, each of its workers a part of those. Without calls of
    `set_epoch` every iteration is the next epoch, with torch's own loader too, whose workers begin anew each time.

    Args:
        files: The dataset.
        shuffle: Whether every epoch has another order, or all that of the names.
        seed: Of the order.
        batch_size: Samples that a worker takes in one go. With the batch size of torch's loader here, its batches
            come in the order of the epoch, whatever the number of workers.
    """

    def __init__(self, files: Files, *, shuffle: bool = True, seed: int = 0, batch_size: int = 1) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} of paths must be at least 1.")
        self.files = files
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self._shared = _shared()
        self._rank: tuple[int, int] | None = None  # that of the process which sent this to a worker
        self._live: tuple[int, int, int, int] | None = None  # epoch, position, paths given, world of the iteration here

    def __len__(self) -> int:
        """Files in an epoch, over all ranks."""
        return len(self.files)

    def __iter__(self) -> Iterator[str]:
        feed = active_feed(self.files)
        return self._share() if feed is None else feed.paths()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration, in this process and in workers, is that epoch from its beginning."""
        self.load_state_dict({"epoch": epoch, "position": 0})

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration of this process is, counting every path it gave; the same on all ranks.

        Raises:
            ConfigError: Workers iterate: only whoever takes their batches knows how many of them were used.
        """
        shared = self._shared.tolist()
        if torch.utils.data.get_worker_info() is not None or (self._live is None and any(shared[_FIRST_SLOT:])):
            raise ConfigError(
                "Worker processes iterate over these paths, so where training is cannot be told here. Count the samples "
                "over all ranks and give {'epoch': e, 'position': samples} to load_state_dict, or use "
                "framework.data.DataLoader, which knows."
            )
        epoch, position, given, world = self._live or (shared[_EPOCH], shared[_POSITION], 0, 1)
        position += given * world
        if position >= len(self.files):
            epoch, position = epoch + 1, 0
        return {"epoch": epoch, "position": position, "seed": self.seed, "files": self.files.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a place: the next iteration begins there, the one after with the next epoch.

        Args:
            state: From `state_dict`, or `epoch` and `position`: the number of samples of it that were used, over all
                ranks. With workers that is exact at multiples of `batch_size · workers · ranks`, or at any number of
                batches where `batch_size` is that of the loader.

        Raises:
            StateMismatchError: It is a place in other files, or in another order.
            ConfigError: There is no such place.
        """
        for key, now in (("files", self.files.fingerprint), ("seed", self.seed)):
            if state.get(key, now) != now:
                raise StateMismatchError(
                    f"The place in the data is one in other data: {key} is {now!r}, and was {state[key]!r} when it was "
                    f"saved. Use the same files and seed, or begin anew with set_epoch(0)."
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self.files):
            raise ConfigError(f"There is no position {position} of epoch {epoch} in {len(self.files)} files.")
        self._live = None
        self._shared.zero_()
        self._shared[_EPOCH], self._shared[_POSITION] = epoch, position

    def __getstate__(self) -> dict[str, Any]:
        joined = dist.is_available() and dist.is_initialized()
        return self.__dict__ | {"_rank": (dist.get_rank(), dist.get_world_size()) if joined else None, "_live": None}

    def _share(self) -> Iterator[str]:
        """This rank's and worker's paths of the epoch that is due."""
        rank, world = rank_of_process(self._rank)
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        epoch, position = self._begin(worker)
        if info is None:
            self._live = (epoch, position, 0, world)
        paths = self.files.local_paths
        paths.kept = max(paths.kept, KEPT, 8 * self.batch_size)
        blocks = self._blocks(epoch, position + rank, world, worker, workers)
        known: deque[int] = deque()
        while True:
            while len(known) < AHEAD and (block := next(blocks, None)) is not None:
                paths.prefetch(block)
                known.extend(block)
            if not known:
                return
            path = paths.path_of(known.popleft())
            if self._live is not None and info is None:
                self._live = (epoch, position, self._live[2] + 1, world)
            yield path

    def _begin(self, worker: int) -> tuple[int, int]:
        slot = _FIRST_SLOT + worker % SLOTS
        begun = int(self._shared[slot])
        self._shared[slot] = begun + 1
        return int(self._shared[_EPOCH]) + begun, 0 if begun else int(self._shared[_POSITION])

    def _blocks(self, epoch: int, first: int, world: int, worker: int, workers: int) -> Iterator[list[int]]:
        """Ids in the order in which this worker gives them.

        Args:
            epoch: Number of the epoch.
            first: Offset of the first file of this rank.
            world: Distance of two files of it.
            worker, workers: Of them this worker takes `batch_size` at a time, in turn with the others.
        """
        count = len(self.files)
        order = Order(count, self.seed, epoch) if self.shuffle else None
        # one at a time is a plain stride, of which many can be computed at once
        length, stride = (self.batch_size, world) if self.batch_size > 1 else (BLOCK, world * workers)
        start = first + worker * self.batch_size * world
        jump = self.batch_size * world * workers if self.batch_size > 1 else BLOCK * stride
        while start < count:
            stop = min(count, start + length * stride)
            ids = np.arange(start, stop, stride) if order is None else order.ids(start, stop, stride)
            yield ids.tolist()
            start += jump


def rank_of_process(known: tuple[int, int] | None = None) -> tuple[int, int]:
    """Rank of this process and number of ranks: as joined, or else as the launcher says, or else alone.

    Args:
        known: Those of the process that started this one, if that had joined.

    Raises:
        ConfigError: The launcher says one of them only, or what cannot be.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if known is not None:
        return known
    texts = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)}
    if not texts:
        return 0, 1
    if len(texts) == 1:
        there, value = next(iter(texts.items()))
        gone = "WORLD_SIZE" if there == "RANK" else "RANK"
        raise ConfigError(
            f"The environment has {there}={value} and no {gone}: every rank would read all files. Set both, or none, or "
            f"start the processes with torchrun."
        )
    try:
        rank, world = int(texts["RANK"]), int(texts["WORLD_SIZE"])
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise ConfigError(f"RANK={texts['RANK']} and WORLD_SIZE={texts['WORLD_SIZE']} are no rank among ranks.")
    return rank, world


def _shared() -> torch.Tensor:
    """What the process that makes a stream shares with workers, of whatever kind: int64 `[2 + SLOTS]`.

    Where the machine has no shared memory each process has its own, and `set_epoch` reaches workers that start later.
    """
    values = torch.zeros(_FIRST_SLOT + SLOTS, dtype=torch.int64)
    with contextlib.suppress(RuntimeError):
        values.share_memory_()  # type: ignore[no-untyped-call]
    return values
