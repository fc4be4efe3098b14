"""What a reader is asked, and how it answers: the same code in the main process and in the workers.

Guarantee: a full batch comes collated; what is less than one comes as it is, so that others can be added to it. An
answer says where the reader is after it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from framework.data.stats import DataStats
from framework.data.streams.probe import Probed, probe
from framework.data.streams.protocol import MergeableStream
from framework.data.streams.reader import Place, Reader, Seat, SharesReader
from framework.errors import DataError

TRAVEL_SECONDS = 0.5  # that a reader is on its way to its place before it says how far it is


class Task(NamedTuple):
    """What a reader is to do.

    Args:
        epoch: Number of the epoch.
        samples: How many samples to give; 0: only go to the place.
        place: Where to go first; none: go on.
        is_probe: Whether to try things with copies of the dataset, and nothing else.
    """

    epoch: int
    samples: int
    place: Place | None = None
    is_probe: bool = False


@dataclass(slots=True)
class Answer:
    """What comes beside the samples.

    Args:
        samples: How many samples there are.
        is_whole: Whether they come as one collated batch.
        has_ended: Whether the reader's epoch ended with them.
        ids: Number of each sample, where receipts are wanted.
        state: The dataset's state after them, pickled; none where none was taken.
        at: Samples of the epoch that the reader has given with these.
        replaced: As in `Receipt`.
        stats: What was counted, if anything was.
        away: Samples to the place that the reader is to go to.
        probed: What a probe found.
    """

    samples: int = 0
    is_whole: bool = False
    has_ended: bool = False
    ids: list[int] = field(default_factory=list)
    state: bytes | None = None
    at: int = 0
    replaced: dict[int, tuple[int, str]] = field(default_factory=dict)
    stats: DataStats | None = None
    away: int = 0
    probed: Probed | None = None


class StreamFetch:
    """Answers the tasks of one reader. Made in the main process, it reads nothing before the first task.

    Args:
        dataset: The stream.
        seed: Seed of the run.
        batch_size: Samples of a batch.
        collate_fn: Makes a batch out of a list of samples.
        rank: This rank.
        world_size: Number of ranks.
        workers: Readers of each rank.
        has_state: Whether the dataset's own states are used.
        on_error: What a sample that cannot be made does, where a stream can go on after it.

    Attributes:
        wants_receipts: Whether answers say which samples they have.
    """

    def __init__(
        self, dataset: Any, seed: int, batch_size: int, collate_fn: Callable[[list[Any]], Any], *,
        rank: int, world_size: int, workers: int, has_state: bool, on_error: str,
    ) -> None:  # fmt: skip
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self.wants_receipts = False
        self._batch_size = batch_size
        self._rank = rank
        self._readers = world_size * workers
        self._workers = workers
        self._has_state = has_state
        self._on_error = on_error
        self._take_stats: Callable[[], DataStats] | None = getattr(dataset, "take_stats", None)
        self._reader: Reader | SharesReader | None = None

    def serve(self, number: int, task: Task, ahead: object, retired: int) -> tuple[Any, Answer]:
        """Does a task: samples (a batch, or a list, pickled in a worker), and what there is to say about them.

        Raises:
            DataError: The stream or the collate function failed.
        """
        reader = self._opened()
        if task.is_probe:
            assert isinstance(reader, Reader)
            return None, Answer(probed=probe(reader.pristine, self.seed, has_state=self._has_state))
        if task.place is not None:
            reader.seek(task.place)
        if not task.samples:
            return None, Answer(away=reader.travel(TRAVEL_SECONDS))
        chunk = reader.take(task.epoch, task.samples)
        ids = chunk.ids if self.wants_receipts or chunk.replaced else []
        answer = Answer(
            len(chunk.samples), len(chunk.samples) == self._batch_size, chunk.has_ended, ids, chunk.state,
            reader.given, chunk.replaced, self._counted(len(chunk.replaced)),
        )  # fmt: skip
        if answer.is_whole:
            return self.collate(chunk.samples), answer
        # Pickled here: one by one through shared memory they would need a file descriptor for each tensor.
        return (chunk.samples if get_worker_info() is None else pickle.dumps(chunk.samples)), answer

    def collate(self, samples: list[Any]) -> Any:
        """One batch.

        Raises:
            DataError: The collate function failed.
        """
        try:
            return self.collate_fn(samples)
        except Exception as error:
            name = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__name__)
            raise DataError(
                f"{name} could not make a batch of {len(samples)} samples of {type(self.dataset).__name__}: "
                f"{type(error).__name__}: {error}. Samples of one batch must have the same fields, shapes and types, or "
                "the recipe needs its own collate."
            ) from error

    def cancel(self) -> None:
        """What was asked for is not wanted any more: the next task says where to go on."""

    def describe(self, task: Task) -> str:
        """A task for an error message."""
        return f"of epoch {task.epoch} ({task.samples} of {type(self.dataset).__name__})"

    def _counted(self, skipped: int) -> DataStats | None:
        """What was counted since the last answer, if anything was."""
        if self._take_stats is None and not skipped:
            return None
        stats = DataStats() if self._take_stats is None else self._take_stats()
        stats.skipped += skipped
        return stats

    def _opened(self) -> Reader | SharesReader:
        if self._reader is None:
            info = get_worker_info()
            seat = Seat(self._rank * self._workers + (0 if info is None else info.id), self._readers)
            if isinstance(self.dataset, MergeableStream):
                self._reader = SharesReader(self.dataset, self.seed, seat, self._on_error)
            else:
                self._reader = Reader(self.dataset, self.seed, seat, has_state=self._has_state)
        return self._reader
