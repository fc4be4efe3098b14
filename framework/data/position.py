"""Where a run is in its data: one integer.

Guarantee: which positions a step consumes, how they are shared out to ranks and micro-batches, and where the next step
begins are pure functions of the position and a few numbers. No state, no clock, nothing about workers.

Training reads one infinite sequence; position `p` is offset `p % samples` of epoch `p // samples`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from framework.errors import ConfigError, DataError

CARRY, DROP = "carry", "drop"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """The samples of one micro-batch of one rank: the positions `start + i · stride` for `i < count`.

    Args:
        start: First position.
        stride: Distance of two positions: the world size.
        count: Number of samples.
    """

    start: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class ListedToken(Token):
    """A token whose ids no arithmetic gives: somebody else's sampler drew them.

    Args:
        epochs: Epoch of each sample, int64 `[count]`.
        ids: Id of each sample, int64 `[count]`.
    """

    epochs: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]


def window_tokens(position: int, global_batch: int, micro_batch: int, rank: int, world: int) -> list[Token]:
    """The micro-batches of one rank in the step that consumes `[position, position + global_batch)`.

    Rank `r` takes every `world`-th position from `position + r` on; micro-batch `m` is the m-th slice of those. The
    last one may be shorter, and there is none where the window has no position for this rank.

    Args:
        position: First position of the step.
        global_batch: Samples of the step over all ranks.
        micro_batch: Samples of one micro-batch, at least 1.
        rank: This rank, 0 to `world - 1`.
        world: Number of ranks.
    """
    share = (global_batch - rank + world - 1) // world
    return [
        Token(position + rank + done * world, world, min(micro_batch, share - done))
        for done in range(0, share, micro_batch)
    ]


def window_start(position: int, global_batch: int, samples: int, epoch_end: str) -> int:
    """The position at which the step begins that is due at `position`.

    That is `position` itself, unless under `drop` fewer than `global_batch` samples remain in its epoch: then it is
    the beginning of the next epoch.
    """
    if epoch_end == DROP and samples - position % samples < global_batch:
        return (position // samples + 1) * samples
    return position


def advance(position: int, global_batch: int, samples: int, epoch_end: str) -> int:
    """The position after the step that is due at `position`; under `drop` the rest of an epoch is passed over.

    Args:
        position: Position before the step.
        global_batch: Samples of the step over all ranks.
        samples: Number of samples in the dataset.
        epoch_end: `carry` or `drop`.
    """
    if epoch_end == CARRY:
        return position + global_batch
    after = window_start(position, global_batch, samples, epoch_end) + global_batch
    return window_start(after, global_batch, samples, epoch_end)


def steps_between(position: int, end: int, global_batch: int, samples: int, epoch_end: str) -> int:
    """Number of steps from `position` until `end` is reached or passed.

    Args:
        position: Position before the first of them.
        end: A position.
        global_batch: Samples of a step over all ranks.
        samples: Number of samples in the dataset.
        epoch_end: `carry` or `drop`.
    """
    if end <= position:
        return 0
    if epoch_end != DROP:
        return -(-(end - position) // global_batch)
    (epoch, offset), (last, rest) = divmod(position, samples), divmod(end, samples)
    left = (samples - offset) // global_batch
    if epoch == last:
        return min(left, -(-(rest - offset) // global_batch))
    whole = samples // global_batch
    return left + (last - epoch - 1) * whole + min(whole, -(-rest // global_batch))


@dataclass(frozen=True, slots=True)
class Plan:
    """The micro-batches of one rank, step after step.

    Args:
        samples: Number of samples in the dataset.
        global_batch: Samples of a step over all ranks.
        micro_batch: Samples of one micro-batch.
        rank: This rank.
        world: Number of ranks.
        epoch_end: `carry` or `drop`.
    """

    samples: int
    global_batch: int
    micro_batch: int
    rank: int
    world: int
    epoch_end: str

    def start(self, position: int) -> int:
        """Where the step begins that is due at `position`."""
        return window_start(position, self.global_batch, self.samples, self.epoch_end)

    def endless(self, position: int) -> Iterator[Token]:
        """The tokens from `position` on, for ever."""
        position = self.start(position)
        while True:
            yield from window_tokens(position, self.global_batch, self.micro_batch, self.rank, self.world)
            position = advance(position, self.global_batch, self.samples, self.epoch_end)

    def epoch(self, position: int) -> Iterator[Token]:
        """The tokens from `position` to the end of its epoch; under `carry` the last step is a short one."""
        end = (position // self.samples + 1) * self.samples
        for start in range(position, end, self.global_batch):
            size = min(self.global_batch, end - start)
            if size == self.global_batch or self.epoch_end == CARRY:
                yield from window_tokens(start, size, self.micro_batch, self.rank, self.world)


def check(samples: int, global_batch: int, epoch_end: str) -> None:
    """Checks that steps of `global_batch` can be taken from `samples`, before anything is started.

    Under `carry` a dataset smaller than one step is legal (a step then spans several epochs): a single warning.

    Raises:
        ConfigError: `epoch_end` is neither `carry` nor `drop`, or the global batch is smaller than 1.
        DataError: The dataset is empty, or under `drop` smaller than one step.
    """
    if epoch_end not in (CARRY, DROP):
        raise ConfigError(f"loader.epoch_end={epoch_end!r} is neither 'carry' nor 'drop'. Choose one of them.")
    if global_batch < 1:
        raise ConfigError(f"trainer.global_batch_size={global_batch} must be at least 1.")
    if samples < 1:
        raise DataError("The dataset is empty (its length is 0). Check data.root and the files below it.")
    if samples < global_batch and epoch_end == DROP:
        raise DataError(
            f"The dataset has {samples} samples, fewer than one global batch of {global_batch}, so that "
            "loader.epoch_end=drop would drop all of them. Use loader.epoch_end=carry or a smaller "
            "trainer.global_batch_size."
        )
    if samples < global_batch:
        _warn_small(samples, global_batch)


@functools.lru_cache(maxsize=64)  # once for each pair of numbers, not once for each loader
def _warn_small(samples: int, global_batch: int) -> None:
    log.warning(
        "The dataset has %d samples, fewer than one global batch of %d: every step spans more than one epoch.",
        samples,
        global_batch,
    )
