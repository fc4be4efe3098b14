"""A loader of streams, with the surface of the loader of map-style datasets.

Guarantee: the place that is saved is the one after what was trained, never after what was prefetched; from it the same
batches follow as without a break. Where a place cannot be kept or handed on, that is said or refused, never passed over
in silence.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from framework.data.base import MOST_PREFETCH, PREFETCH_FACTOR, TIMEOUT_SECONDS, WORKER_RESTARTS, default_num_workers
from framework.data.delivery import Delivery
from framework.data.position import CARRY, DROP
from framework.data.receipt import Receipt
from framework.data.seeding import is_cuda_used
from framework.data.stats import DataStats
from framework.data.streams.answering import StreamFetch, Task
from framework.data.streams.meeting import Meeting
from framework.data.streams.places import Cut, RankPlace, Shape, parts_of, place_of, resumed
from framework.data.streams.probe import USELESS
from framework.data.streams.reader import Place
from framework.data.streams.reading import Reading
from framework.data.streams.sources import InProcess, Source, Workers
from framework.data.streams.turns import Mark, Turns
from framework.duration import ENDLESS
from framework.errors import ConfigError, DataError

SHARDS, STATEFUL, EPOCH, FAST_FORWARD = "shards", "stateful", "epoch", "fast-forward"
TELL_SECONDS = 10.0  # between two words on how far a reader still has to read

log = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]


def _alone(value: Any) -> list[Any]:
    return [value]


class StreamLoader:
    """Endless micro-batches of an iterable dataset, for a training loop; its own iterator.

    Args:
        dataset: The stream. It splits itself over ranks and loader workers; a `MergeableStream` is split here.
        batch_size: Samples of one micro-batch on this rank.
        strategy: How the place is kept: `shards`, `stateful`, `epoch` or `fast-forward`.
        samples: Samples of an epoch over all ranks, or `ENDLESS` where that is not known.
        seed: Seed of the run.
        global_batch_size: Samples of one step over all ranks; default `batch_size · world_size`.
        rank: This rank.
        world_size: Number of ranks.
        epoch_end: `carry` or `drop`.
        collate_fn: Makes a batch out of a list of samples; default torch's.
        num_workers: Loader processes; default from the CPUs; 0 loads in this one.
        prefetch_factor: Batches that each worker prepares ahead.
        pin_memory: Page-locked batches; default with workers where CUDA is available.
        timeout: Longest wait for a batch in seconds.
        on_error: What a sample that cannot be made does, where the stream can go on: `raise`, `skip` or `substitute`
            (both: another of its chunk takes its place).
        worker_restarts: How many workers that die are replaced per epoch.
        is_checked: Whether it is tried out that the dataset splits itself.
        gather: Gives every rank's value to every rank; default for one rank.

    Attributes:
        samples: Samples of an epoch over all ranks.
        strategy: See above.

    Raises:
        ConfigError: A number makes no sense.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        strategy: str,
        samples: int = ENDLESS,
        seed: int = 0,
        global_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        epoch_end: str = CARRY,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = TIMEOUT_SECONDS,
        on_error: str = "raise",
        worker_restarts: int = WORKER_RESTARTS,
        is_checked: bool = True,
        gather: Gather = _alone,
    ) -> None:
        workers = default_num_workers() if num_workers is None else num_workers
        prefetch = PREFETCH_FACTOR if prefetch_factor is None else prefetch_factor
        _check(workers, prefetch, timeout, worker_restarts)
        self._depth = workers * prefetch or 1
        self.dataset = dataset
        self.strategy = strategy
        self.samples = samples
        self.num_workers = workers
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._shape = Shape(world_size, max(1, workers))
        self._is_mergeable = strategy == SHARDS
        self._drop_after = None
        if epoch_end == DROP and samples != ENDLESS:
            whole = batch_size * world_size if global_batch_size is None else global_batch_size
            self._drop_after = samples // whole * (whole // world_size)
        self._timeout = timeout
        self._worker_restarts = worker_restarts
        wants_pinned = (workers > 0 and torch.cuda.is_available()) if pin_memory is None else pin_memory
        self._is_pinned = wants_pinned and torch.accelerator.is_available()
        self._fetch = StreamFetch(
            dataset, seed, batch_size, collate_fn or default_collate, rank=rank, world_size=world_size,
            workers=self._shape.readers, has_state=strategy == STATEFUL, on_error=on_error,
        )  # fmt: skip
        self._meeting = Meeting(
            type(dataset).__name__, self._shape, rank, gather,
            is_split_checked=is_checked and not self._is_mergeable, has_state=strategy == STATEFUL,
        )  # fmt: skip
        self._delivery = Delivery(is_committed=True, name=type(dataset).__name__)
        self._source: Source | None = None
        self._place = RankPlace(Mark.start(0, self._shape.readers))
        self._reading: Reading | None = None
        self._loaded_position: int | None = None
        self._is_told = False

    # -- batches -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> StreamLoader:
        self._opened()
        if self._reading is None:
            self._begin()
        return self

    def __next__(self) -> Any:
        reading = self._reading
        if reading is None:
            raise RuntimeError("This loader was closed. Call iter() to begin again.")
        try:
            batch = reading.next()
        except DataError:
            self.close()
            raise
        if reading.turns.ended:
            self._end_epochs(reading)
        return batch

    def is_ready(self) -> bool:
        """Whether the next batch is here, so that asking for it takes no time."""
        return self._reading is not None and self._reading.is_ready()

    def first_batch(self) -> Any:
        """A batch from the beginning of the stream, short where there are few samples; nothing counts as read.

        Raises:
            DataError: There is none.
        """
        source = self._opened()
        source.clear()
        self._reading = None
        start = self._start_of(RankPlace(Mark.start(0, source.readers)))
        for reader in range(source.readers):
            task = Task(0, self._batch_size, start(0, reader))
            given, answer = source.wait(source.send(reader, task))
            if answer.samples:
                return given if answer.is_whole else self._fetch.collate(given)
        raise DataError(f"{type(self.dataset).__name__} gave no sample to the readers of rank {self._rank}.")

    def ids(self, position: int) -> npt.NDArray[np.int64]:
        """The ids of a step are not known before it is loaded."""
        return np.empty(0, dtype=np.int64)

    def take_stats(self) -> DataStats:
        """What loading counted since this was asked last, of the batches that were handed out."""
        stats = self._delivery.stats.take()
        if isinstance(self._source, Workers):
            stats.worker_restarts, self._source.restarts = self._source.restarts, 0
        return stats

    def close(self) -> None:
        """Ends the workers; another `iter()` starts new ones where training is. Idempotent."""
        if self._reading is not None:
            self._place = self._now()
            self._reading = None
        if self._source is not None:
            self._source.close()
            self._source = None

    def __del__(self) -> None:
        if getattr(self, "_source", None) is not None:  # the constructor may have failed
            self.close()

    # -- the place ---------------------------------------------------------------------------------------------------

    def commit(self, batches: int) -> list[Receipt]:
        """Says that the next `batches` batches that were handed out were trained.

        Returns:
            Their receipts, where `wants_receipts` is set; otherwise nothing.

        Raises:
            ValueError: Fewer were handed out.
        """
        if self._reading is None:
            raise ValueError(f"{batches} batches cannot be committed: none were handed out.")
        return self._reading.commit(batches)

    @property
    def is_at_epoch_start(self) -> bool:
        """Whether nothing of the present epoch was trained on this rank."""
        return self._now().mark.is_start

    def state(self) -> dict[str, Any]:
        """This rank's place as of the last commit, plain values."""
        return self._now().saved()

    def load_state(self, states: list[dict[str, Any]], position: int) -> None:
        """Takes over the places of all ranks of a checkpoint, and brings the readers there.

        Args:
            states: What `state` gave on each of its ranks.
            position: In samples over all epochs and ranks.

        Raises:
            StateMismatchError: Other ranks or workers read then, and this stream's place cannot be handed on.
            DataError: A reader cannot go there.
        """
        self._reading = None
        self._place = self._resumed(states, position)
        self._travel()
        self._begin(is_there=True)
        self._loaded_position = position

    def check_state(self, states: list[dict[str, Any]], position: int) -> None:
        """Whether `load_state` could take these places over. Changes nothing.

        Raises:
            StateMismatchError: It could not.
        """
        self._resumed(states, position)

    def _resumed(self, states: list[dict[str, Any]], position: int) -> RankPlace:
        return resumed(states, position, self.samples, self._shape, self._rank, self.dataset, self._seed)

    def seek(self, position: int) -> None:
        """Goes to the place that was loaded for this position, or to the beginning of an epoch.

        Args:
            position: In samples over all epochs and ranks.

        Raises:
            ValueError: It is neither.
        """
        loaded, self._loaded_position = self._loaded_position, None
        if loaded == position:
            return
        epoch, offset = (0, position) if self.samples == ENDLESS else divmod(position, self.samples)
        if offset:
            raise ValueError(f"A stream can be sought to the beginning of an epoch, not to its sample {offset}.")
        was_begun = self._reading is not None
        self._reading = None
        self._place = RankPlace(Mark.start(epoch, self._shape.readers), cut=Cut(position, position))
        if was_begun:
            self._begin()

    @property
    def wants_receipts(self) -> bool:
        """Whether `commit` gives receipts. Set it before the first iteration."""
        return self._delivery.keeps_receipts

    @wants_receipts.setter
    def wants_receipts(self, value: bool) -> None:
        self._delivery.keeps_receipts = self._fetch.wants_receipts = value

    # -- how it works ------------------------------------------------------------------------------------------------

    def _opened(self) -> Source:
        if self._source is None:
            if self.num_workers:
                self._source = Workers(
                    self._fetch, self.num_workers, self._depth, timeout_seconds=self._timeout, choose_method=_method,
                    worker_restarts=self._worker_restarts, is_pinned=self._is_pinned,
                    name=f"rank {self._rank} of {self._shape.ranks}",
                )  # fmt: skip
            else:
                self._source = InProcess(self._fetch, is_pinned=self._is_pinned)
            self._meeting.hold(self._source)
        return self._source

    def _begin(self, *, is_there: bool = False) -> None:
        """Starts to read at the place."""
        source, place = self._opened(), self._place
        if place.late == 0:
            place.late = self._meeting.late
        samples, shape = self.samples, self._shape
        # Pure functions, not methods: a loader that is dropped ends its workers at once.
        parts = functools.partial(parts_of, place.cut, samples, shape, self._rank, is_exact=self._is_mergeable)
        turns = Turns(
            source.readers, self._batch_size, place.mark.copy(), parts, is_exact=self._is_mergeable,
            drop_after=self._drop_after,
        )  # fmt: skip
        self._delivery.begin(self._delivery.number)
        self._reading = Reading(
            self._fetch, source, turns, place, self._delivery, batch_size=self._batch_size,
            depth=self._depth, place_of=self._start_of(place), is_there=is_there,
            is_pinned=self._is_pinned,
        )  # fmt: skip

    def _start_of(self, place: RankPlace) -> Callable[[int, int], Place]:
        """The place of a reader where it begins with an epoch."""
        return functools.partial(place_of, place, self.samples, self._shape, is_mergeable=self._is_mergeable)

    def _travel(self) -> None:
        """Brings all readers to the place, however long they have to read on the way."""
        source, place = self._opened(), self._place
        source.clear()
        start, epoch = self._start_of(place), place.mark.epoch
        self._announce(place)
        tasks = {reader: Task(epoch, 0, start(epoch, reader)) for reader in range(source.readers)}
        told = time.monotonic()
        while tasks:
            numbers = {reader: source.send(reader, task) for reader, task in tasks.items()}
            away = {reader: source.wait(number)[1].away for reader, number in numbers.items()}
            tasks = {reader: Task(epoch, 0) for reader, left in away.items() if left}
            if tasks and time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                log.info("rank %d: %d samples still to be passed over", self._rank, max(away.values()))

    def _announce(self, place: RankPlace) -> None:
        if self._is_mergeable or self._rank:
            return
        at = [0 if state is None else state[0] for state in place.states] or [0] * self._shape.readers
        skipped = [taken - start for taken, start in zip(place.mark.taken, at, strict=True)]
        name, taken = type(self.dataset).__name__, sum(place.mark.taken)
        if self.strategy == STATEFUL and place.late != USELESS:
            log.info("%s takes up its own state in epoch %d, after %d samples", name, place.mark.epoch, taken)
        elif any(skipped):
            log.warning(
                "%s has no state that it could go on from: epoch %d is read again up to sample %d of this rank, and what "
                "was trained is passed over. With state_dict and load_state_dict it would go on at once.",
                name, place.mark.epoch, taken,
            )  # fmt: skip

    def _now(self) -> RankPlace:
        reading, place = self._reading, self._place
        if reading is None:
            return place
        return RankPlace(reading.committed.copy(), reading.states(), place.late, place.cut)

    def _end_epochs(self, reading: Reading) -> None:
        """Compares what an epoch gave with what it was said to give, once."""
        share = self.samples // self._shape.ranks
        while reading.turns.ended:
            epoch, given = reading.turns.ended.popleft()
            is_known = self.samples != ENDLESS and self._drop_after is None and self.samples % self._shape.ranks == 0
            if is_known and given != share and not self._is_told and not self._is_mergeable:
                self._is_told = True
                name, ranks = type(self.dataset).__name__, self._shape.ranks
                log.warning(
                    "%s gave %d samples of epoch %d to rank %d; its length says %d%s. Each sample is trained once, but "
                    "what is counted in epochs is not exact: correct its __len__ or loader.samples_per_epoch%s.",
                    name, given, epoch, self._rank, self.samples, f", {share} for each of {ranks} ranks" * (ranks > 1),
                    ", or the way that it is split" * (ranks > 1),
                )  # fmt: skip
        if self._drop_after is not None:
            reading.drop_unused()


def _method() -> str:
    """The start method of a worker that starts now."""
    return "forkserver" if is_cuda_used() else "fork"  # a forked child of a process that uses CUDA inherits its locks


def _check(workers: int, prefetch: int, timeout: float, worker_restarts: int) -> None:
    if workers < 0:
        raise ConfigError(f"loader.num_workers={workers} is negative. Use 0 to load in the training process.")
    if not 1 <= prefetch <= MOST_PREFETCH:
        raise ConfigError(f"loader.prefetch_factor={prefetch} must be from 1 to {MOST_PREFETCH} batches a worker.")
    if not timeout > 0:
        raise ConfigError(f"loader.timeout={timeout:g} must be greater than 0: a wait without end hides its cause.")
    if worker_restarts < 0:
        raise ConfigError(f"loader.worker_restarts={worker_restarts} is negative. Use 0 to replace no worker.")
