"""Data loaders whose position is one integer.

Guarantee: the batches of a step depend on the position, the seed, the batch sizes, the rank and the world size, and on
nothing else: not on the number of workers, nor on what was loaded, prefetched or lost before. With 0 workers the random
generators of the process are left as they were.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from framework import distributed
from framework.data.fetch import Fetcher, map_style_length, pin
from framework.data.fetch import to_device as to_device  # handed on: it belongs to the loader's interface
from framework.data.position import CARRY, DROP, Plan, Token, check, window_tokens
from framework.data.seeding import is_cuda_used, kept
from framework.data.workers import WorkerPool
from framework.errors import ConfigError, DataError

MOST_WORKERS = 6  # of the default; more than that rarely helps one device
PREFETCH_FACTOR = 4
MOST_PREFETCH = 64  # as many tokens fit into a worker's socket: sending one never waits
TIMEOUT_SECONDS = 600.0

Collate = Callable[[list[Any]], Any]


class _Loader(torch.utils.data.DataLoader[Any]):
    """What both loaders share: a stream of tokens, and who turns it into batches."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        is_shuffled: bool,
        is_evaluation: bool,
        rank: int,
        world_size: int,
        collate_fn: Collate | None,
        num_workers: int | None,
        prefetch_factor: int | None,
        pin_memory: bool | None,
        timeout: float,
        multiprocessing_context: str | None,
        drop_last: bool = False,
    ) -> None:
        self.samples = map_style_length(dataset)
        if batch_size < 1:
            raise ConfigError(f"The batch size is {batch_size}; it must be at least 1.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"Rank {rank} is not one of {world_size} ranks (0 to {world_size - 1}).")
        if not timeout > 0:
            raise ConfigError(f"loader.timeout={timeout:g} must be greater than 0: a wait without end hides its cause.")
        workers = default_num_workers() if num_workers is None else num_workers
        ahead = PREFETCH_FACTOR if prefetch_factor is None else prefetch_factor
        if workers < 0:
            raise ConfigError(f"loader.num_workers={workers} is negative. Use 0 to load in the training process.")
        if not 1 <= ahead <= MOST_PREFETCH:
            raise ConfigError(f"loader.prefetch_factor={ahead} must be from 1 to {MOST_PREFETCH} batches a worker.")
        super().__init__(
            dataset,
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=(workers > 0 and torch.cuda.is_available()) if pin_memory is None else pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            prefetch_factor=ahead if workers else None,
            persistent_workers=workers > 0,
            multiprocessing_context=multiprocessing_context if workers else None,
        )
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start_method = multiprocessing_context
        self.fetch = Fetcher(
            dataset, self.samples, seed, self.collate_fn, is_shuffled=is_shuffled, is_evaluation=is_evaluation
        )
        self._pool: WorkerPool | None = None
        self._running: weakref.ref[_Batches] | None = None  # weak: a loader that is dropped ends its workers at once

    def _tokens(self) -> Iterator[Token]:
        """The tokens of the next iteration."""
        raise NotImplementedError

    def __iter__(self) -> Any:
        tokens = self._tokens()
        in_process = self.num_workers == 0
        batches = _InProcess(self.fetch, tokens, self._is_pinned) if in_process else _InWorkers(self, tokens)
        self._running = weakref.ref(batches)
        return batches

    def close(self) -> None:
        """Ends the workers; the running iteration ends with them, and another `iter()` starts new ones. Idempotent."""
        self._running = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:  # the constructor may have failed
            self.close()

    @property
    def _current(self) -> _Batches | None:
        """The iteration that runs, if any."""
        return None if self._running is None else self._running()

    @property
    def _is_pinned(self) -> bool:
        return self.pin_memory and torch.accelerator.is_available()

    def _running_pool(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(
                self.fetch,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch_factor or PREFETCH_FACTOR,
                timeout_seconds=self.timeout,
                # A forked child of a process that uses CUDA inherits locks that nobody will release.
                method=self.start_method or ("forkserver" if is_cuda_used() else "fork"),
                is_pinned=self._is_pinned,
                name=f"rank {self.rank} of {self.world_size}",
            )
        return self._pool


class _Batches(Iterator[Any]):
    """One iteration over a loader."""

    def replace(self, tokens: Iterator[Token]) -> None:
        """Goes on with other tokens; what was prefetched is dropped."""
        raise NotImplementedError


class _InProcess(_Batches):
    def __init__(self, fetch: Fetcher, tokens: Iterator[Token], is_pinned: bool) -> None:
        self._fetch = fetch
        self._tokens = tokens
        self._is_pinned = is_pinned

    def __next__(self) -> Any:
        token = next(self._tokens)
        with kept():
            batch = self._fetch(token)
        return pin(batch) if self._is_pinned else batch

    def replace(self, tokens: Iterator[Token]) -> None:
        self._tokens = tokens


class _InWorkers(_Batches):
    def __init__(self, loader: _Loader, tokens: Iterator[Token]) -> None:
        self._loader = loader
        self.replace(tokens)

    def __next__(self) -> Any:
        loader = self._loader
        if loader._current is not self:
            raise RuntimeError(
                "This iteration ended when its loader was closed or iterated again: its workers serve one iteration at "
                "a time. Use a second loader for a second iteration."
            )
        try:
            return loader._running_pool().next()
        except DataError:
            loader.close()
            raise

    def replace(self, tokens: Iterator[Token]) -> None:
        self._loader._running_pool().restart(tokens)


class DataLoader(_Loader):
    """Batches of a map-style dataset in the order of the run, from any position.

    Alone it is used like torch's: each `iter()` gives one epoch, every epoch in another order. For a training loop
    (`endless`) it gives the micro-batches of step after step, over all epochs, from `position` on.

    Args:
        dataset: Has `__len__` and `__getitem__(index)`; if it has `sample_key(index) -> str | int`, that identifies the
            sample for its random numbers, otherwise its index does. Each sample is loaded by `dataset[index]`, with
            python's, numpy's and torch's default generators seeded for it.
        batch_size: Samples of one (micro-)batch on this rank.
        shuffle: Whether samples come in the order of `Order`, or by their index.
        seed: Seed of the run.
        global_batch_size: Samples of one step over all ranks; default `batch_size · world_size`.
        rank: This rank; default from the launcher.
        world_size: Number of ranks; default from the launcher.
        epoch_end: `carry`: nothing is dropped; an endless loader's step may span two epochs, otherwise the last batch
            is short. `drop`: what does not fill a step is left out.
        drop_last: The same as `epoch_end="drop"`, as torch spells it.
        position: Where the first iteration begins, in samples over all epochs and ranks.
        endless: Whether one iteration goes on for ever, or ends with its epoch. Where the last step of an epoch is
            short, ranks may differ in their number of batches: with collectives use `endless` or `drop`.
        collate_fn: Makes a batch out of a list of samples, in the worker; default torch's.
        num_workers: Loader processes; default from the CPUs and the number of ranks on this host; 0 loads in this one.
        prefetch_factor: Batches that each worker prepares ahead; default 4.
        pin_memory: Page-locked batches; default with workers where CUDA is available.
        timeout: Longest wait for a batch in seconds.
        persistent_workers: Accepted for torch's sake; workers always live until `close`.
        multiprocessing_context: Start method; default `fork`, and `forkserver` once CUDA is in use.

    Raises:
        ConfigError: The dataset cannot be loaded by position, or a number makes no sense.
        DataError: The dataset is empty, or under `drop` smaller than a step.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = True,
        *,
        seed: int = 0,
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        epoch_end: str = CARRY,
        drop_last: bool = False,
        position: int = 0,
        endless: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = TIMEOUT_SECONDS,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
    ) -> None:
        world = distributed.world_size() if world_size is None else world_size
        self.global_batch_size = batch_size * world if global_batch_size is None else global_batch_size
        self.epoch_end = DROP if drop_last else epoch_end
        self.is_endless = endless
        self._position = position
        samples = map_style_length(dataset)
        # A short last batch needs no warning: without `endless` it is what everybody expects.
        check(samples, self.global_batch_size if endless or self.epoch_end != CARRY else 1, self.epoch_end)
        super().__init__(
            dataset,
            batch_size,
            seed=seed,
            is_shuffled=shuffle,
            is_evaluation=False,
            rank=distributed.rank() if rank is None else rank,
            world_size=world,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
            drop_last=self.epoch_end == DROP,
        )
        # Apart from the loader, so that the stream of tokens that its workers hold does not keep it alive.
        self._plan = Plan(samples, self.global_batch_size, batch_size, self.rank, self.world_size, self.epoch_end)

    def seek(self, position: int) -> None:
        """Goes to a position: the running iteration, if there is one, continues there; what was prefetched is dropped.

        Args:
            position: In samples over all epochs and ranks, at least 0.
        """
        if position < 0:
            raise ValueError(f"Position {position} is before the first sample. It must be at least 0.")
        self._position = position
        current = self._current
        if current is not None:
            current.replace(self._tokens())

    def ids(self, position: int) -> npt.NDArray[np.int64]:
        """The ids of the whole global batch of the step that is due at `position`, int64 `[global_batch_size]`."""
        return self.fetch.ids(Token(self._plan.start(position), 1, self.global_batch_size))

    def __len__(self) -> int:
        """The number of batches of this rank in one epoch."""
        if self.is_endless:
            raise TypeError("An endless loader has no length.")
        return sum(1 for _ in self._plan.epoch(0))

    def _tokens(self) -> Iterator[Token]:
        if self.is_endless:
            return self._plan.endless(self._position)
        start = self._plan.start(self._position)
        self._position = (start // self.samples + 1) * self.samples
        return self._plan.epoch(start)


class EvalLoader(_Loader):
    """All samples of a dataset once, by their index: each `iter()` is one pass.

    Rank `r` takes the samples `r, r + world_size, …`; its last batch may be short, and a rank may have one batch less
    than another. The samples' random numbers do not depend on where training is.

    Args:
        dataset, batch_size, seed, rank, world_size, collate_fn, num_workers, and the rest: As in `DataLoader`.

    Raises:
        ConfigError: The dataset cannot be loaded by position, or a number makes no sense.
        DataError: The dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int | None = None,
        collate_fn: Collate | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = TIMEOUT_SECONDS,
        multiprocessing_context: str | None = None,
    ) -> None:
        check(map_style_length(dataset), 1, CARRY)
        super().__init__(
            dataset,
            batch_size,
            seed=seed,
            is_shuffled=False,
            is_evaluation=True,
            rank=rank,
            world_size=world_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
        )

    def __len__(self) -> int:
        """The number of batches of this rank in one pass."""
        return len(self._list_tokens())

    def _tokens(self) -> Iterator[Token]:
        return iter(self._list_tokens())

    def _list_tokens(self) -> list[Token]:
        assert self.batch_size is not None
        return window_tokens(0, self.samples, self.batch_size, self.rank, self.world_size)


def default_num_workers() -> int:
    """Loader processes of one rank where none are configured: this rank's share of the CPUs, less one for itself."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MOST_WORKERS, cpus // local_ranks - 1))
