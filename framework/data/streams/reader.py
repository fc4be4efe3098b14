"""One reader of a stream: what it gives, and where it is.

Guarantee: what a reader gives is a pure function of its place, the seed, its number and the dataset. A place is after
the last sample that was given, also where the dataset was asked for one more to see whether there is one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.data.private import Generators
from framework.data.seeding import sample_key, seed_sample
from framework.data.streams.pristine import Pristine
from framework.data.streams.probe import USELESS
from framework.data.streams.protocol import Done, MergeableStream
from framework.data.streams.states import capture, prepared, put_back
from framework.errors import DataError

MOST_BETWEEN = 64  # takes between two states of a dataset whose states are large
_LONG_SECONDS = 0.001  # a state that takes less is small
_COST = 0.02  # of the time of loading, for states

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reader goes on.

    Args:
        epoch: Number of the epoch.
        taken: Samples of it that the reader has given.
        state: The dataset's own state, pickled; none for the beginning of the epoch.
        at: Samples that had been given when the state was taken.
        late: Samples by which states are behind: one where the dataset counts only when it is asked for the next;
            `USELESS` where they do not lead back to the next sample.
        done: Of a `MergeableStream`: what was done before the shares were cut.
        shares: Of a `MergeableStream`: samples of each reader.
    """

    epoch: int
    taken: int = 0
    state: bytes | None = None
    at: int = 0
    late: int = 0
    done: Done | None = None
    shares: tuple[int, ...] | None = None


@dataclass(slots=True)
class Chunk:
    """What a reader gave at once.

    Args:
        samples: In order; fewer than asked for where its epoch ends.
        has_ended: Whether its epoch ended with them.
        ids: Number of each sample.
        state: The dataset's state after the last of them, pickled; none where none was taken.
        replaced: Places of samples that could not be made: place → (id, what was wrong); another one is there.
    """

    samples: list[Any]
    has_ended: bool
    ids: list[int]
    state: bytes | None = None
    replaced: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """Which reader of how many, over all ranks and workers."""

    number: int
    readers: int

    def __str__(self) -> str:
        return f"reader {self.number} of {self.readers}"


class Reader:
    """Reads an iterable dataset, epoch after epoch.

    Args:
        dataset: Nobody has read from it yet.
        seed: Seed of the run.
        seat: Which reader this is.
        has_state: Whether its place is kept by `state_dict` and `load_state_dict`; otherwise it is read up to it.
    """

    def __init__(self, dataset: Any, seed: int, seat: Seat, *, has_state: bool) -> None:
        self.name = type(dataset).__name__
        self.pristine = Pristine(dataset, self.name)
        self._seed = seed
        self._seat = seat
        self._can_have_state = self._has_state = has_state
        self._first_state = dataset.state_dict() if has_state and not self.pristine.is_copied else None
        self._dataset: Any = None
        self._generators = Generators()
        self._iterator: Iterator[Any] | None = None
        self._epoch = -1
        self._goal = 0  # samples of the epoch that were given
        self._made = 0  # samples of the epoch that the dataset gave
        self._held: Any = _NOTHING  # the one that it was asked for ahead
        self._every, self._since = 1, 0  # takes between two states, and since the last one

    @property
    def given(self) -> int:
        """Samples of the epoch that it gave."""
        return self._made - (self._held is not _NOTHING)

    def seek(self, place: Place) -> None:
        """Sets out for a place; `travel` or `take` go on with the way.

        Raises:
            DataError: The dataset cannot go there.
        """
        self._epoch, self._held, self._since = place.epoch, _NOTHING, self._every
        self._goal, self._made = place.taken, max(0, place.at - place.late) if place.state is not None else 0
        self._has_state = self._can_have_state and place.late != USELESS
        key = sample_key(self._seed, place.epoch, f"stream/{self._seat.number}/begin")
        try:
            self._dataset = self.pristine.get(place.epoch)
            self._generators = prepared(self._dataset, self._seed, place.epoch)
            seed_sample(key)
            if place.state is not None:
                put_back(self._dataset, self._generators, place.state)
            elif self._first_state is not None:
                self._dataset.load_state_dict(self._first_state)
            self._iterator = iter(self._dataset)
        except Exception as error:
            what = f"go to sample {place.taken} of" if place.taken else "begin"
            raise DataError(
                f"{self.name} could not {what} epoch {place.epoch} ({self._seat}): {type(error).__name__}: {error}"
            ) from error

    def travel(self, seconds: float) -> int:
        """Reads on to the place that was set out for.

        Args:
            seconds: After so long it pauses.

        Returns:
            Samples that are still to be passed over.

        Raises:
            DataError: There is no such place.
        """
        deadline = time.monotonic() + seconds
        while self._made < self._goal and time.monotonic() < deadline:
            if self._next() is _NOTHING:
                raise DataError(
                    f"{self.name} ended after {self._made} samples of epoch {self._epoch} ({self._seat}); at the "
                    f"checkpoint it had given {self._goal}. Its data or the way it is split have changed."
                )
        return self._goal - self._made

    def take(self, epoch: int, count: int) -> Chunk:
        """The next samples of an epoch.

        Args:
            epoch: The present epoch, or the one to begin.
            count: How many, at least 1.

        Raises:
            DataError: The dataset failed.
        """
        began = time.perf_counter()
        if epoch != self._epoch or self._iterator is None:
            self.seek(Place(epoch, late=0 if self._has_state else USELESS))
        self.travel(math.inf)
        samples: list[Any] = []
        first = self.given
        if self._held is not _NOTHING:
            samples.append(self._held)
            self._held = _NOTHING
        while len(samples) < count and (sample := self._next()) is not _NOTHING:
            samples.append(sample)
        state = self._state(began) if self._has_state and len(samples) == count else None
        if len(samples) == count:
            self._held = self._next()
        numbers = range(first, first + len(samples))
        ids = [index * self._seat.readers + self._seat.number for index in numbers]
        return Chunk(samples, self._held is _NOTHING, ids, state)

    def _next(self) -> Any:
        assert self._iterator is not None
        seed_sample(sample_key(self._seed, self._epoch, f"stream/{self._seat.number}/{self._made}"))
        try:
            sample = next(self._iterator, _NOTHING)
        except Exception as error:
            raise DataError(
                f"{self.name} could not give sample {self._made} of epoch {self._epoch} ({self._seat}): "
                f"{type(error).__name__}: {error}"
            ) from error
        self._made += sample is not _NOTHING
        return sample

    def _state(self, began: float) -> bytes | None:
        """The state of the dataset, if it is due: one that takes long is taken less often."""
        self._since += 1
        if self._since < self._every:
            return None
        loading = time.perf_counter() - began
        start = time.thread_time()  # of this thread: on a busy machine a small state does not pass for a large one
        state = capture(self._dataset, self._generators)
        is_costly = time.thread_time() - start > max(_LONG_SECONDS, _COST * self._every * loading)
        self._every = min(MOST_BETWEEN, 2 * self._every) if is_costly else self._every
        self._since = 0
        return state


class SharesReader:
    """Reads one share of a `MergeableStream`.

    Args:
        stream: What is read.
        seed: Seed of the run.
        seat: Which reader this is.
        on_error: What a sample does that cannot be made: `raise`, or `skip`: another of the same chunk takes its place.
    """

    def __init__(self, stream: MergeableStream, seed: int, seat: Seat, on_error: str) -> None:
        self.name = type(stream).__name__
        self._stream = stream
        self._seed = seed
        self._seat = seat
        self._on_error = on_error
        self._iterator: Iterator[tuple[int, Any]] = iter(())
        self.given = 0  # samples of the epoch
        self._epoch = -1
        self._left = 0

    def seek(self, place: Place) -> None:
        """Goes to a place; it has shares."""
        assert place.shares is not None
        self._epoch, self.given = place.epoch, place.taken
        self._left = place.shares[self._seat.number] - place.taken
        self._iterator = iter(
            self._stream.begin(
                place.epoch, seed=self._seed, done=place.done, shares=place.shares, consumer=self._seat.number,
                taken=place.taken,
            )
        )  # fmt: skip

    def travel(self, seconds: float) -> int:
        """It is there at once."""
        return 0

    def take(self, epoch: int, count: int) -> Chunk:
        """The next samples of the present epoch.

        Raises:
            DataError: The stream failed, or ended too early.
        """
        assert epoch == self._epoch
        chunk = Chunk([], False, [])
        failures: dict[int, tuple[int, str]] = {}
        while len(chunk.samples) < min(count, self._left):
            number, sample = self._next()
            if isinstance(sample, Exception):
                failures[len(chunk.samples)] = (number, self._passed_over(number, sample))
            chunk.samples.append(sample)
            chunk.ids.append(number)
        self._left -= len(chunk.samples)
        self.given += len(chunk.samples)
        chunk.has_ended = self._left == 0
        if failures:
            self._mend(chunk, failures)
        return chunk

    def _next(self) -> tuple[int, Any]:
        try:
            return next(self._iterator)
        except DataError:
            raise
        except StopIteration:
            raise DataError(
                f"{self.name} ended {self._left} samples too early in epoch {self._epoch} ({self._seat}): it is shorter "
                "than it says. Count its samples anew."
            ) from None
        except Exception as error:
            raise DataError(
                f"{self.name} failed in epoch {self._epoch} ({self._seat}): {type(error).__name__}: {error}"
            ) from error

    def _passed_over(self, number: int, error: Exception) -> str:
        text = f"{self.name} could not give sample {number} of epoch {self._epoch}: {type(error).__name__}: {error}"
        if self._on_error == "raise" or isinstance(error, MemoryError):
            raise DataError(text) from error
        return text

    def _mend(self, chunk: Chunk, failures: dict[int, tuple[int, str]]) -> None:
        good = [place for place in range(len(chunk.samples)) if place not in failures]
        if not good:
            raise DataError(
                f"None of {len(chunk.samples)} samples could be made, so that loader.on_error={self._on_error} has "
                f"nothing to put in their place. The first: {failures[0][1]}"
            )
        for place in failures:
            other = next((one for one in good if one > place), good[0])
            chunk.samples[place], chunk.ids[place] = chunk.samples[other], chunk.ids[other]
        chunk.replaced = failures


def shares_of(epoch: int, samples: int, start: int, origin: int, ranks: int, workers: int) -> tuple[int, ...]:
    """How what is left of an epoch is cut into shares: as the positions are, so that ranks stay in step.

    Rank `r` reads the positions `origin + r`, `origin + r + ranks`, …; its workers share them equally.

    Args:
        epoch: Number of the epoch.
        samples: Length of an epoch.
        start: What of the epoch lies before this position is done.
        origin: Where the run began to read with these ranks.
        ranks: Number of ranks.
        workers: Readers of each.

    Returns:
        Samples of each reader, `[ranks · workers]`.
    """
    first, end = max(start, epoch * samples), (epoch + 1) * samples
    shares: list[int] = []
    for rank in range(ranks):
        before = _count(first - origin, rank, ranks)
        share = _count(end - origin, rank, ranks) - before
        shares += [share // workers + (worker < share % workers) for worker in range(workers)]
    return tuple(shares)


def _count(stop: int, rank: int, ranks: int) -> int:
    """How many of the numbers from 0 to below `stop` leave the remainder `rank`."""
    return max(0, stop - rank + ranks - 1) // ranks if stop > 0 else 0


def taken_of(readers: Sequence[int], shares: Sequence[int], is_past: Sequence[bool]) -> list[int]:
    """What each reader has taken of an epoch: all of its share where it is in the next one already."""
    return [share if past else taken for taken, share, past in zip(readers, shares, is_past, strict=True)]
