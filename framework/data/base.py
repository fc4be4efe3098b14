"""What every loader of this package shares: a stream of tokens, and who turns it into batches.

Guarantee: loading in the process and loading in workers give the same batches, are announced to the dataset alike and
enter the same books.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from framework.data.delivery import Delivery
from framework.data.device import pin
from framework.data.fetch import Fetcher, map_style_length
from framework.data.position import Token
from framework.data.seeding import is_cuda_used
from framework.data.stats import DataStats
from framework.data.workers import WorkerPool
from framework.errors import ConfigError, DataError

MOST_WORKERS = 6  # of the default; more than that rarely helps one device
PREFETCH_FACTOR = 4
MOST_PREFETCH = 64  # as many tokens fit into a worker's socket: sending one never waits
LOOK_AHEAD = 8  # batches a worker, of a dataset that fetches files ahead
MOST_LOOK_AHEAD = 256
TIMEOUT_SECONDS = 600.0
WORKER_RESTARTS = 3

Collate = Callable[[list[Any]], Any]


class Loader(torch.utils.data.DataLoader[Any]):
    """A stream of tokens, and who turns it into batches.

    Args:
        dataset, batch_size, seed, …: As in `DataLoader`.
        samples: Length of an epoch.
        is_shuffled: Whether ids come in the order of `Order`, or as they are.
        is_evaluation: Whether random numbers are those of evaluation.
        is_committed: Whether somebody says which batches were trained.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        samples: int,
        seed: int,
        is_shuffled: bool,
        is_evaluation: bool,
        is_committed: bool,
        rank: int,
        world_size: int,
        collate_fn: Collate | None,
        num_workers: int | None,
        prefetch_factor: int | None,
        pin_memory: bool | None,
        timeout: float,
        multiprocessing_context: Any,
        look_ahead: int | None,
        on_error: str,
        worker_restarts: int,
        drop_last: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"The batch size is {batch_size}; it must be at least 1.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"Rank {rank} is not one of {world_size} ranks (0 to {world_size - 1}).")
        if not timeout > 0:
            raise ConfigError(f"loader.timeout={timeout:g} must be greater than 0: a wait without end hides its cause.")
        workers = default_num_workers() if num_workers is None else num_workers
        ahead = PREFETCH_FACTOR if prefetch_factor is None else prefetch_factor
        _check_numbers(workers, ahead, look_ahead, worker_restarts)
        super().__init__(
            dataset,
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=(workers > 0 and torch.cuda.is_available()) if pin_memory is None else pin_memory,
            drop_last=drop_last and batch_sampler is None,
            sampler=sampler,
            batch_sampler=batch_sampler,
            timeout=timeout,
            prefetch_factor=ahead if workers else None,
            persistent_workers=workers > 0,
            multiprocessing_context=multiprocessing_context if workers else None,
            worker_init_fn=worker_init_fn,
        )
        self.samples = samples
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start_method: str | None = multiprocessing_context
        if hasattr(multiprocessing_context, "get_start_method"):
            self.start_method = multiprocessing_context.get_start_method()
        self.worker_restarts = worker_restarts
        self.fetch = Fetcher(
            dataset, map_style_length(dataset), seed, self.collate_fn,
            is_shuffled=is_shuffled, is_evaluation=is_evaluation, on_error=on_error,
        )  # fmt: skip
        self.look_ahead = look_ahead if look_ahead is not None else LOOK_AHEAD * (self.fetch.hooks.prefetch is not None)
        self._delivery = Delivery(is_committed=is_committed, name=type(dataset).__name__)
        self._pool: WorkerPool | None = None
        self._running: weakref.ref[Batches] | None = None  # weak: a loader that is dropped ends its workers at once

    def _tokens(self) -> Iterator[Token]:
        """The tokens of the next iteration."""
        raise NotImplementedError

    def __iter__(self) -> Any:
        tokens = self._tokens()
        batches = InProcess(self, tokens) if self.num_workers == 0 else InWorkers(self, tokens)
        self._running = weakref.ref(batches)
        return batches

    def take_stats(self) -> DataStats:
        """What loading counted since this was asked last, over all workers, of the batches that were handed out."""
        return self._delivery.stats.take()

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
    def _current(self) -> Batches | None:
        """The iteration that runs, if any."""
        return None if self._running is None else self._running()

    @property
    def _is_pinned(self) -> bool:
        return self.pin_memory and torch.accelerator.is_available()

    def _running_pool(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(
                self.fetch,
                self._delivery,
                samples=self.samples,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch_factor or PREFETCH_FACTOR,
                look_ahead=self.look_ahead,
                timeout_seconds=self.timeout,
                # A forked child of a process that uses CUDA inherits locks that nobody will release.
                choose_method=_AlwaysOrByCuda(self.start_method),
                worker_restarts=self.worker_restarts,
                is_pinned=self._is_pinned,
                name=f"rank {self.rank} of {self.world_size}",
                init=self.worker_init_fn,
            )
        return self._pool


class _AlwaysOrByCuda:
    """The start method of a worker that starts now; no method of the loader, whose workers must not keep it alive."""

    def __init__(self, method: str | None) -> None:
        self._method = method

    def __call__(self) -> str:
        return self._method or ("forkserver" if is_cuda_used() else "fork")


class Batches(Iterator[Any]):
    """One iteration over a loader."""

    def replace(self, tokens: Iterator[Token]) -> None:
        """Goes on with other tokens; what was prefetched is dropped."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether the next batch is here, so that asking for it takes no time."""
        raise NotImplementedError


class InProcess(Batches):
    """Loads each batch when it is asked for.

    Args:
        loader: Whose.
        tokens: What to load.
    """

    def __init__(self, loader: Loader, tokens: Iterator[Token]) -> None:
        self._fetch = loader.fetch
        self._delivery = loader._delivery
        self._look_ahead = loader.look_ahead
        self._is_pinned = loader._is_pinned
        self.replace(tokens)

    def __next__(self) -> Any:
        if not self._upcoming:
            raise StopIteration
        delivery, token, ahead = self._delivery, self._upcoming.popleft(), self._unannounced
        self._unannounced: list[Token] = list(itertools.islice(self._tokens, 1))
        self._upcoming.extend(self._unannounced)
        number = delivery.number
        with self._fetch.without_trace():
            batch, receipt = self._fetch.serve(number, token, ahead if self._look_ahead else [], delivery.retired)
        delivery.hand_out(number, token, receipt)
        return pin(batch) if self._is_pinned else batch

    def replace(self, tokens: Iterator[Token]) -> None:
        self._fetch.cancel()
        self._delivery.begin(self._delivery.number)
        self._tokens = tokens
        self._upcoming = deque(itertools.islice(tokens, 1 + self._look_ahead))
        self._unannounced = [*self._upcoming]

    def is_ready(self) -> bool:
        return False


class InWorkers(Batches):
    """Batches of the loader's workers.

    Args:
        loader: Whose.
        tokens: What to load.
    """

    def __init__(self, loader: Loader, tokens: Iterator[Token]) -> None:
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

    def is_ready(self) -> bool:
        pool = self._loader._pool
        return pool is not None and self._loader._current is self and pool.is_ready()


def default_num_workers() -> int:
    """Loader processes of one rank where none are configured: this rank's share of the CPUs, less one for itself."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MOST_WORKERS, cpus // local_ranks - 1))


def _check_numbers(workers: int, ahead: int, look_ahead: int | None, worker_restarts: int) -> None:
    if workers < 0:
        raise ConfigError(f"loader.num_workers={workers} is negative. Use 0 to load in the training process.")
    if not 1 <= ahead <= MOST_PREFETCH:
        raise ConfigError(f"loader.prefetch_factor={ahead} must be from 1 to {MOST_PREFETCH} batches a worker.")
    if look_ahead is not None and not 0 <= look_ahead <= MOST_LOOK_AHEAD:
        raise ConfigError(f"loader.look_ahead={look_ahead} must be from 0 to {MOST_LOOK_AHEAD} batches a worker.")
    if worker_restarts < 0:
        raise ConfigError(f"loader.worker_restarts={worker_restarts} is negative. Use 0 to replace no worker.")
