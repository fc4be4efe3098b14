"""The place of a rank in a stream, as a checkpoint keeps it, and who may take it over.

Guarantee: with the same ranks and readers a run goes on exactly where it was; with others it goes on exactly once where
the stream allows it, or is refused with both numbers. Nothing here is guessed.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.data.streams.protocol import Done, MergeableStream
from framework.data.streams.reader import Place, shares_of, taken_of
from framework.data.streams.turns import Mark
from framework.duration import ENDLESS
from framework.errors import StateMismatchError
from framework.speaking import count_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many read.

    Args:
        ranks: Number of ranks.
        readers: Readers of each.
    """

    ranks: int
    readers: int

    def __str__(self) -> str:
        return f"{count_text(self.ranks, 'rank')} x {count_text(self.readers, 'reader')}"


@dataclass(slots=True)
class Cut:
    """How a `MergeableStream` is cut into shares.

    Args:
        origin: Position at which these ranks began to read.
        start: Position before which everything is done: that of `done`, or the beginning of an epoch.
        done: What is done of the epoch of `start`; none for nothing.
    """

    origin: int = 0
    start: int = 0
    done: Done | None = None

    def shares(self, epoch: int, samples: int, shape: Shape) -> tuple[int, ...]:
        """Samples of each reader in an epoch, `[ranks · readers]`."""
        return shares_of(epoch, samples, self.start, self.origin, shape.ranks, shape.readers)

    def done_of(self, epoch: int, samples: int) -> Done | None:
        """What was done of an epoch before it was cut."""
        return self.done if epoch == self.start // samples else None


@dataclass(slots=True)
class RankPlace:
    """Where one rank is.

    Args:
        mark: Where its turns are.
        states: State of each reader's dataset, pickled, and how many samples it had given; none for the beginning.
        late: See `Place`.
        cut: Of a `MergeableStream`.
    """

    mark: Mark
    states: list[tuple[int, bytes] | None] = field(default_factory=list)
    late: int = 0
    cut: Cut = field(default_factory=Cut)

    def saved(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        mark, cut = self.mark, self.cut
        return {
            "epoch": mark.epoch,
            "turn": mark.turn,
            "taken": list(mark.taken),
            "lap": list(mark.lap),
            "overtime": mark.is_overtime,
            "late": self.late,
            "states": [None if one is None else {"at": one[0], "state": pickle.loads(one[1])} for one in self.states],
            "cut": {"origin": cut.origin, "start": cut.start, "done": cut.done},
        }

    @classmethod
    def of(cls, saved: dict[str, Any]) -> RankPlace:
        """What `saved` gave."""
        mark = Mark(saved["epoch"], saved["turn"], tuple(saved["taken"]), tuple(saved["lap"]), saved["overtime"])
        states = [
            None if one is None else (one["at"], pickle.dumps(one["state"], pickle.HIGHEST_PROTOCOL))
            for one in saved["states"]
        ]
        return cls(mark, states, saved["late"], Cut(**saved["cut"]))


def parts_of(cut: Cut, samples: int, shape: Shape, rank: int, epoch: int, *, is_exact: bool) -> tuple[int, ...] | None:
    """Samples of each reader of a rank in one epoch, or none where that is not known.

    Args:
        cut: Of a `MergeableStream`.
        samples: Length of an epoch, or `ENDLESS`.
        shape: How many read.
        rank: This rank.
        epoch: Number of the epoch.
        is_exact: Whether the stream is cut here; otherwise it is taken to split itself evenly.
    """
    readers = shape.readers
    if is_exact:
        return cut.shares(epoch, samples, shape)[rank * readers : (rank + 1) * readers]
    if readers == 1 or samples == ENDLESS or samples % shape.ranks:
        return None
    share = samples // shape.ranks
    return tuple(share // readers + (reader < share % readers) for reader in range(readers))


def place_of(start: RankPlace, samples: int, shape: Shape, epoch: int, reader: int, *, is_mergeable: bool) -> Place:
    """Where a reader begins with an epoch.

    Args:
        start: Where its rank started.
        samples: Length of an epoch, or `ENDLESS`.
        shape: How many read.
        epoch: Number of the epoch.
        reader: Which one of the rank.
        is_mergeable: Whether the stream is a `MergeableStream`.
    """
    is_first = epoch == start.mark.epoch
    taken = start.mark.taken[reader] if is_first else 0
    if is_mergeable:
        cut = start.cut
        shares = cut.shares(epoch, samples, shape)
        return Place(epoch, taken, done=cut.done_of(epoch, samples), shares=shares)
    state = start.states[reader] if is_first and start.states else None
    if state is None:
        return Place(epoch, taken, late=start.late)
    return Place(epoch, taken, state[1], state[0], start.late)


def resumed(
    saved: Sequence[dict[str, Any]], position: int, samples: int, shape: Shape, rank: int, stream: Any, seed: int
) -> RankPlace:
    """The place of a rank that goes on from a checkpoint.

    Args:
        saved: Places of all ranks of the checkpoint.
        position: Its position, in samples over all epochs and ranks.
        samples: Length of an epoch.
        shape: Of this run.
        rank: This rank.
        stream: What is read.
        seed: Seed of the run.

    Raises:
        StateMismatchError: Others read then, and this stream's place cannot be handed on.
    """
    if not saved:  # something else kept the place then, and that is permitted
        log.warning(
            "the checkpoint knows no readers: epoch %d of %s starts over", position // samples, type(stream).__name__
        )
        start = position // samples * samples
        return RankPlace(Mark.start(position // samples, shape.readers), cut=Cut(start, start))
    places = [RankPlace.of(one) for one in saved]
    before = Shape(len(places), len(places[0].mark.taken))
    if before == shape:
        return places[rank]
    epochs = {place.mark.epoch for place in places}
    if len(epochs) == 1 and all(place.mark.is_start for place in places):
        return RankPlace(
            Mark.start(places[0].mark.epoch, shape.readers), late=places[0].late, cut=Cut(position, position)
        )
    if not isinstance(stream, MergeableStream):
        raise StateMismatchError(
            f"The checkpoint was made by {before}, this run has {shape}. {type(stream).__name__} keeps a place for each "
            f"reader (a loader worker, or a rank with none), which others cannot take over. Use as many ranks and "
            f"loader.num_workers as then, resume at the end of an epoch, or use loader.split=samples."
        )
    return RankPlace(
        Mark.start(position // samples, shape.readers),
        cut=Cut(position, position, _merged(places, before, position, samples, stream, seed)),
    )


def _merged(
    places: Sequence[RankPlace], shape: Shape, position: int, samples: int, stream: MergeableStream, seed: int
) -> Done | None:
    epoch, cut = position // samples, places[0].cut
    if position == epoch * samples:
        return None
    shares = cut.shares(epoch, samples, shape)
    taken = [one for place in places for one in place.mark.taken]
    is_past = [place.mark.epoch > epoch for place in places for _ in place.mark.taken]
    return stream.merge(
        epoch, seed=seed, done=cut.done_of(epoch, samples), shares=shares, taken=taken_of(taken, shares, is_past)
    )
