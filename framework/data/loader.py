"""Data loaders whose position is one integer.

Guarantee: the batches of a step depend on the position, the seed, the batch sizes, the rank and the world size, and on
nothing else: not on the number of workers, nor on what was loaded, prefetched or lost before. With 0 workers the random
generators of the process are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from framework import distributed
from framework.data.base import TIMEOUT_SECONDS, WORKER_RESTARTS, Collate, Loader
from framework.data.fetch import map_style_length
from framework.data.fetch import to_device as to_device  # handed on: it belongs to the loader's interface
from framework.data.files.paths import with_index
from framework.data.position import CARRY, DROP, Plan, Token, check, window_tokens
from framework.data.receipt import Receipt
from framework.data.reporting import Reporter, Sink
from framework.data.sampler import BatchPlan, Drawing, SamplerPlan
from framework.data.samples import RAISE
from framework.errors import ConfigError


class DataLoader(Loader):
    """Batches of a map-style dataset in the order of the run, from any position.

    Alone it is used like torch's: each `iter()` gives one epoch, every epoch in another order. For a training loop
    (`endless`) it gives the micro-batches of step after step, over all epochs, from `position` on.

    Args:
        dataset: Has `__len__` and `__getitem__(index)`; if it has `sample_key(index) -> str | int`, that identifies the
            sample for its random numbers, otherwise its index does. Each sample is loaded by `dataset[index]`, with
            python's, numpy's and torch's default generators seeded for it. An iterable one that makes one sample of
            each path of a `VolumeDataset` is fine, too.
        batch_size: Samples of one (micro-)batch on this rank.
        shuffle: Whether samples come in the order of `Order`, which is the default, or by their index.
        sampler: Gives the order of each epoch in place of that, as whole numbers. It is told the epoch by `set_epoch`,
            if it has that, and what it draws at random hangs on the seed and the epoch alone. One with the attributes
            `num_replicas` and `rank` (torch's `DistributedSampler`, also inside another) gives this rank's share; what
            another one gives is divided over the ranks.
        batch_sampler: Gives whole batches in the same way; not for `endless`.
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
        multiprocessing_context: Start method, or a context of it; default `fork`, and `forkserver` once CUDA is in use.
        look_ahead: Batches of each worker, beyond those being made, that a dataset with a method `prefetch` is told of;
            default 8.
        on_error: What a sample that cannot be loaded does: `raise`; `skip`: the next good sample of its micro-batch
            takes its place; `substitute`: another sample of the dataset does, drawn by hash.
        worker_restarts: How many workers that die are replaced per epoch.
        worker_init_fn: Called in each worker before anything else, with its number.
        generator, in_order, pin_memory_device: Torch's; refused where they ask for another order or device than the one.
        metrics: For use without the trainer: how long the loop waits for data, and what loading counted
            (`data/fetch_seconds`, `data/fetch_fraction`, `data/cache_hit_rate`, …), every 50 batches. `mlflow`: to the
            active run, from rank 0; or a function of the values by name and the number of the batch.

    Attributes:
        samples: Samples of an epoch over all ranks.
        strategy: How the place in the data is kept: `offset`, one integer.

    Raises:
        ConfigError: The dataset cannot be loaded by position, or a number makes no sense.
        DataError: The dataset is empty, or under `drop` smaller than a step.
    """

    strategy = "offset"

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = None,
        *,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
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
        multiprocessing_context: Any = None,
        look_ahead: int | None = None,
        on_error: str = RAISE,
        worker_restarts: int = WORKER_RESTARTS,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: None = None,
        in_order: bool = True,
        pin_memory_device: str = "",
        metrics: str | Sink | None = None,
    ) -> None:
        _check_as_torch(batch_size, generator, in_order, pin_memory_device, worker_init_fn)
        world = distributed.world_size() if world_size is None else world_size
        rank = distributed.rank() if rank is None else rank
        self.global_batch_size = batch_size * world if global_batch_size is None else global_batch_size
        self.epoch_end = DROP if drop_last else epoch_end
        self.is_endless = endless
        self._position = position
        dataset = with_index(dataset)
        # Apart from the loader, so that the stream of tokens that its workers hold does not keep it alive.
        self._plan = self._planned(dataset, batch_size, shuffle, seed, rank, world, sampler, batch_sampler)
        samples = self._plan.samples
        # A short last batch needs no warning: without `endless` it is what everybody expects.
        check(samples, self.global_batch_size if endless or self.epoch_end != CARRY else 1, self.epoch_end)
        super().__init__(
            dataset, batch_size, samples=samples, seed=seed, is_shuffled=shuffle is not False, is_evaluation=False,
            is_committed=endless, rank=rank, world_size=world, collate_fn=collate_fn, num_workers=num_workers,
            prefetch_factor=prefetch_factor, pin_memory=pin_memory, timeout=timeout, look_ahead=look_ahead,
            multiprocessing_context=multiprocessing_context, on_error=on_error, worker_restarts=worker_restarts,
            drop_last=self.epoch_end == DROP, sampler=sampler, batch_sampler=batch_sampler,
            worker_init_fn=worker_init_fn,
        )  # fmt: skip
        is_told = metrics is not None and (rank == 0 or callable(metrics))
        self._reporter = Reporter(metrics, self._delivery.stats.take) if metrics is not None and is_told else None

    def _planned(
        self, dataset: Any, batch_size: int, shuffle: bool | None, seed: int, rank: int, world: int, sampler: Any,
        batch_sampler: Any,
    ) -> Plan | SamplerPlan | BatchPlan:  # fmt: skip
        length = map_style_length(dataset)
        if sampler is None and batch_sampler is None:
            return Plan(length, self.global_batch_size, batch_size, rank, world, self.epoch_end)
        what = "sampler" if batch_sampler is None else "batch_sampler"
        if shuffle:
            raise ConfigError(f"A {what} says the order itself: leave shuffle out.")
        if batch_sampler is None:
            drawing = Drawing(sampler, seed, rank, world)
            return SamplerPlan(drawing, length, self.global_batch_size, batch_size, self.epoch_end)
        if sampler is not None or batch_size != 1 or self.epoch_end == DROP or self.is_endless:
            raise ConfigError(
                "A batch_sampler says order and batches itself: leave out sampler, batch_size, drop_last and endless. The "
                "steps of a training loop have the size of the global batch; give it the order alone, as a sampler."
            )
        return BatchPlan(Drawing(batch_sampler, seed, rank, world), length)

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
        """The ids of the whole global batch of the step that is due at `position`, int64 `[global_batch_size]`.

        Where a sampler gives the share of this rank, only that is known.
        """
        if isinstance(self._plan, Plan):
            return self.fetch.ids(Token(self._plan.start(position), 1, self.global_batch_size))
        return self._plan.ids(position)

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return batches if self._reporter is None else self._reporter.measured(batches)

    def close(self) -> None:
        super().close()
        reporter = getattr(self, "_reporter", None)  # the constructor may have failed
        if reporter is not None:
            reporter.close()

    def commit(self, batches: int) -> list[Receipt]:
        """Says that the next `batches` batches that were handed out were trained, and are in use no more.

        An endless loader counts on it: what was handed out is in use until then.

        Returns:
            Their receipts, where `wants_receipts` is set; otherwise nothing.

        Raises:
            ValueError: Fewer were handed out.
        """
        return self._delivery.commit(batches)

    def state(self) -> dict[str, Any]:
        """This rank's place in the data beside the position: nothing, the position says it all."""
        return {}

    def load_state(self, states: list[dict[str, Any]], position: int) -> None:
        """Takes over the places of all ranks of a checkpoint, before `seek`. There is nothing to take over."""

    @property
    def wants_receipts(self) -> bool:
        """Whether `commit` gives receipts. Set it before the first iteration: workers are told when they start."""
        return self.fetch.wants_receipts

    @wants_receipts.setter
    def wants_receipts(self, value: bool) -> None:
        self.fetch.wants_receipts = self._delivery.keeps_receipts = value

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


def _check_as_torch(batch_size: Any, generator: Any, in_order: bool, pin_memory_device: str, init: Any) -> None:
    """Refuses what torch's loader can do and this one cannot.

    Raises:
        ConfigError: It is asked for.
    """
    if batch_size is None:
        raise ConfigError(
            "batch_size=None would load without batches. Use batch_size=1 with a collate_fn that gives its only sample, "
            "or a batch_sampler."
        )
    if generator is not None:
        raise ConfigError(
            "generator=…: the order and all random numbers of samples hang on the seed alone, so that they can be found "
            "again. Give seed=… in its place; a sampler may have a generator."
        )
    if not in_order:
        raise ConfigError("in_order=False: batches come in the order of their positions. Leave it out.")
    if pin_memory_device:
        raise ConfigError(
            f"pin_memory_device={pin_memory_device!r}: memory is page-locked for the device in use. Leave it out."
        )
    if init is not None and not callable(init):
        raise ConfigError(f"worker_init_fn={init!r} cannot be called. Give a function of the worker's number.")


class EvalLoader(Loader):
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
        multiprocessing_context: Any = None,
        look_ahead: int | None = None,
        on_error: str = RAISE,
        worker_restarts: int = WORKER_RESTARTS,
    ) -> None:
        dataset = with_index(dataset)
        samples = map_style_length(dataset)
        check(samples, 1, CARRY)
        super().__init__(
            dataset,
            batch_size,
            samples=samples,
            seed=seed,
            is_shuffled=False,
            is_evaluation=True,
            is_committed=False,
            rank=rank,
            world_size=world_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
            look_ahead=look_ahead,
            on_error=on_error,
            worker_restarts=worker_restarts,
        )

    def __len__(self) -> int:
        """The number of batches of this rank in one pass."""
        return len(self._list_tokens())

    def _tokens(self) -> Iterator[Token]:
        return iter(self._list_tokens())

    def _list_tokens(self) -> list[Token]:
        assert self.batch_size is not None
        return window_tokens(0, self.samples, self.batch_size, self.rank, self.world_size)
