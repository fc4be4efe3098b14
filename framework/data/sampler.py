"""Orders that somebody else's sampler draws, made into positions.

Guarantee: what a sampler draws for an epoch is a pure function of the seed and the number of the epoch, wherever a run
begins: it is told the epoch, and its random numbers come from a hash of both. A sampler that gives one rank's share is
used as that, and never divided again; one that gives everything is divided by stride. A resume passes over what was
trained without loading it.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch.utils.data

from framework.data.position import CARRY, ListedToken, Token, advance, window_start
from framework.data.private import Generators
from framework.data.seeding import derive, forked
from framework.errors import ConfigError, DataError

Ids = npt.NDArray[np.int64]
T = TypeVar("T")

_DEPTH = 4  # of samplers in samplers
_KEPT = 3  # epochs: a batch may span some, and look-ahead be in the next
_TOPOLOGY = (("num_replicas", "rank"), ("world_size", "rank"), ("_world_size", "_rank"))


class Drawing:
    """What a sampler gives, epoch by epoch.

    Args:
        sampler: Gives ids, or lists of ids: one batch each.
        seed: Seed of the run.
        rank: This rank.
        world: Number of ranks.

    Attributes:
        is_share: Whether it gives the share of one rank, this one's.

    Raises:
        ConfigError: It gives the share of another rank, or of another number of ranks.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, rank: int, world: int) -> None:
        self.sampler = sampler
        self.name = type(sampler).__name__
        self.rank = rank
        self.world = world
        self._seed = seed
        self._samplers = list(_samplers(sampler))
        self._generators = Generators(sampler=sampler)
        self.is_share = self._is_share()

    def epoch(self, epoch: int) -> list[Any]:
        """What it gives in one epoch: whole numbers, or lists of them.

        Raises:
            DataError: It failed.
        """
        key = derive(self._seed, "sampler", epoch)
        state = self._generators.state()
        try:
            with forked(key):
                self._generators.seed(key)
                for each in self._samplers:
                    if callable(getattr(each, "set_epoch", None)):
                        each.set_epoch(epoch)
                return list(self.sampler)
        except Exception as error:
            raise DataError(
                f"{self.name} could not give the order of epoch {epoch}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._generators.restore(state)

    def _is_share(self) -> bool:
        for each in self._samplers:
            for size, rank in _TOPOLOGY:
                count, number = getattr(each, size, None), getattr(each, rank, None)
                if not isinstance(count, int) or not isinstance(number, int) or count == 1:
                    continue
                if (count, number) != (self.world, self.rank):
                    raise ConfigError(
                        f"{type(each).__name__} gives the share of rank {number} of {count}, but this is rank "
                        f"{self.rank} of {self.world}. Make it for this rank and number of ranks, or give a sampler of "
                        "all samples, which is then divided."
                    )
                return True
        return False


class SamplerPlan:
    """The micro-batches of one rank in the order of a sampler, step after step.

    Args:
        drawing: Gives ids.
        length: Of the dataset.
        global_batch: Samples of one step over all ranks.
        micro_batch: Samples of one micro-batch.
        epoch_end: `carry` or `drop`.

    Attributes:
        samples: Samples per epoch over all ranks.

    Raises:
        DataError: It gives no ids of the dataset.
    """

    def __init__(self, drawing: Drawing, length: int, global_batch: int, micro_batch: int, epoch_end: str) -> None:
        self._drawing = drawing
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._epoch_end = epoch_end
        self._orders = _Epochs(lambda epoch: checked_ids(drawing, drawing.epoch(epoch), length))
        self._share = len(self._orders.get(0))  # also where it says a length that it does not give
        self.samples = self._share * (drawing.world if drawing.is_share else 1)

    def start(self, position: int) -> int:
        """Where the step begins that is due at `position`."""
        return window_start(position, self._global_batch, self.samples, self._epoch_end)

    def endless(self, position: int) -> Iterator[Token]:
        """The tokens from `position` on, for ever."""
        position = self.start(position)
        while True:
            yield from self._window(position, self._global_batch)
            position = advance(position, self._global_batch, self.samples, self._epoch_end)

    def epoch(self, position: int) -> Iterator[Token]:
        """The tokens from `position` to the end of its epoch; under `carry` the last step is a short one."""
        end = (position // self.samples + 1) * self.samples
        for start in range(position, end, self._global_batch):
            size = min(self._global_batch, end - start)
            if size == self._global_batch or self._epoch_end == CARRY:
                yield from self._window(start, size)

    def ids(self, position: int) -> Ids:
        """The ids of the step that is due at `position`, of all ranks, or of this one if no more is known."""
        start = self.start(position)
        stop = start + self._global_batch
        positions = self._mine(start, stop) if self._drawing.is_share else np.arange(start, stop)
        return self._origin(positions)[1]

    def _window(self, start: int, size: int) -> Iterator[Token]:
        mine = self._mine(start, start + size)
        epochs, ids = self._origin(mine)
        for done in range(0, len(mine), self._micro_batch):
            part = slice(done, done + self._micro_batch)
            yield ListedToken(int(mine[done]), self._drawing.world, len(mine[part]), epochs[part], ids[part])

    def _mine(self, start: int, stop: int) -> Ids:
        """The positions of this rank in a step."""
        rank, world = self._drawing.rank, self._drawing.world
        # Of a share the i-th belongs to position `i · world + rank`, wherever a step begins.
        first = start + (rank - start) % world if self._drawing.is_share else start + rank
        return np.arange(first, stop, world, dtype=np.int64)

    def _origin(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, places = np.divmod(positions, self.samples)
        if self._drawing.is_share:
            places = places // self._drawing.world
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            ids[here] = self._checked(epoch)[places[here]]
        return epochs, ids

    def _checked(self, epoch: int) -> Ids:
        order = self._orders.get(epoch)
        if len(order) != self._share:
            raise DataError(_uneven(self._drawing, len(order), self._share, epoch))
        return order


class BatchPlan:
    """The batches of one rank as a batch sampler gives them, an epoch at a time.

    Args:
        drawing: Gives lists of ids.
        length: Of the dataset.

    Attributes:
        samples: Samples per epoch over all ranks.

    Raises:
        DataError: It gives no ids of the dataset.
    """

    def __init__(self, drawing: Drawing, length: int) -> None:
        self._drawing = drawing
        self._length = length
        self._batches = _Epochs(drawing.epoch)
        self.samples = sum(self._sizes(0))

    def start(self, position: int) -> int:
        """The position itself: a batch is never cut."""
        return position

    def endless(self, position: int) -> Iterator[Token]:
        """Refused: steps of a training loop have a size of their own.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{self._drawing.name} makes batches, but the steps of an endless loader have the size of the global batch. "
            "Give the order alone, as a sampler."
        )

    def epoch(self, position: int) -> Iterator[Token]:
        """The batches from `position` to the end of its epoch.

        Raises:
            DataError: The position lies within a batch.
        """
        epoch, offset = divmod(position, self.samples)
        sizes, passed = self._sizes(epoch), 0
        if sum(sizes) != self.samples:
            raise DataError(_uneven(self._drawing, sum(sizes), self.samples, epoch))
        for batch, size in zip(self._mine(epoch), sizes, strict=False):  # the last round may have none for this rank
            if passed >= offset:
                ids = checked_ids(self._drawing, batch, self._length)
                epochs = np.full(len(ids), epoch, dtype=np.int64)
                yield ListedToken(epoch * self.samples + passed, 1, len(ids), epochs, ids)
            elif passed + size > offset:
                raise DataError(
                    f"Position {position} lies within a batch of {self._drawing.name}: one begins at "
                    f"{position - offset + passed}, the next at {position - offset + passed + size}."
                )
            passed += size

    def ids(self, position: int) -> Ids:
        """The ids of this rank's batch at `position`."""
        return next((token.ids for token in self.epoch(position) if isinstance(token, ListedToken)), _NOTHING)

    def _mine(self, epoch: int) -> list[Any]:
        batches = self._batches.get(epoch)
        return batches if self._drawing.is_share else batches[self._drawing.rank :: self._drawing.world]

    def _sizes(self, epoch: int) -> list[int]:
        """Samples over all ranks that pass with each batch of this rank."""
        world, batches = self._drawing.world, self._batches.get(epoch)
        if self._drawing.is_share:
            return [len(batch) * world for batch in batches]
        return [sum(len(batch) for batch in batches[at : at + world]) for at in range(0, len(batches), world)]


class _Epochs(Generic[T]):
    """What was made of the last few epochs."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._made: OrderedDict[int, T] = OrderedDict()

    def get(self, epoch: int) -> T:
        if epoch not in self._made:
            while len(self._made) >= _KEPT:
                self._made.popitem(last=False)
            self._made[epoch] = self._make(epoch)
        return self._made[epoch]


def _uneven(drawing: Drawing, now: int, first: int, epoch: int) -> str:
    return (
        f"{drawing.name} gives {now} samples in epoch {epoch} and gave {first} in epoch 0. A position needs as many in "
        "each epoch."
    )


_NOTHING = np.empty(0, dtype=np.int64)


def checked_ids(drawing: Drawing, values: list[Any], length: int) -> Ids:
    """What a sampler gave as ids, int64 `[any]`.

    Raises:
        DataError: It gave none, or something that is no index of the dataset.
    """
    try:
        ids = np.array([operator.index(value) for value in values], dtype=np.int64)
    except (TypeError, ValueError) as error:
        kind = type(values[0]).__name__
        raise DataError(
            f"{drawing.name} gives {kind}s, such as {values[0]!r:.80}. A position needs whole numbers: indices of the "
            "dataset."
        ) from error
    if not ids.size:
        raise DataError(f"{drawing.name} gives no samples.")
    if ids.min() < 0 or ids.max() >= length:
        outside = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise DataError(f"{drawing.name} gives the index {outside}; the dataset has {length} samples.")
    return ids


def _samplers(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it holds."""
    waiting, seen = [(sampler, 0)], set()
    while waiting:
        each, depth = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if depth < _DEPTH:
            inside = [*getattr(each, "__dict__", {}).values()]
            waiting += [(one, depth + 1) for one in inside if _looks_like_a_sampler(one)]


def _looks_like_a_sampler(value: Any) -> bool:
    if isinstance(value, torch.utils.data.Dataset | torch.utils.data.DataLoader | type):
        return False
    return isinstance(value, torch.utils.data.Sampler) or (hasattr(value, "__iter__") and hasattr(value, "set_epoch"))
