"""Several datasets mixed by weight, still with one integer as the position.

Guarantee: which sample of which dataset stands at a position is a pure function of the position, the seed, the names,
weights and lengths. Every block of `BLOCK` positions holds each dataset exactly in proportion to its weight, spread
evenly over the block; each dataset runs through its own epochs and gives every sample once in each of them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from framework.data.order import Order
from framework.data.seeding import derive
from framework.data.stats import DataStats
from framework.errors import ConfigError, DataError, StateMismatchError

SPEC = "mix/1"
BLOCK = 65_536  # positions whose composition is exact

Ids = npt.NDArray[np.int64]


class Mix(Dataset[Any]):
    """A map-style dataset out of several.

    An id of the mix is the id within its dataset plus the lengths of the datasets before it, by the order of names as
    given. One epoch of the mix has `samples` positions; a dataset with a large weight is seen several times in it, one
    with a small weight in parts.

    Args:
        sources: Map-style datasets by name.
        weights: Share of each, by name, in any unit; default their lengths.
        samples: Length of an epoch of the mix; default the sum of the lengths.

    Raises:
        ConfigError: The names of weights and sources differ, or a weight is no number above 0 or below 1/65,536 of all.
        DataError: A dataset is empty.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None, samples: int | None = None
    ) -> None:
        self.names = list(sources)
        self.sources = [sources[name] for name in self.names]
        self.lengths = [len(source) for source in self.sources]
        for name, length in zip(self.names, self.lengths, strict=True):
            if length < 1:
                raise DataError(f"The dataset '{name}' of the mix is empty.")
        if not self.names:
            raise ConfigError("A mix of no datasets was asked for. Name at least one under sources.")
        if samples is not None and samples < 1:
            raise ConfigError(f"samples={samples} of the mix must be at least 1.")
        self.shares = _shares(self.names, weights or dict(zip(self.names, self.lengths, strict=True)))
        self.starts = [0, *np.cumsum(self.lengths).tolist()]
        self._samples = sum(self.lengths) if samples is None else samples
        self._handed_out: deque[int] = deque()  # the source of each sample that may still be in use

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        number, local = self._home(index)
        if hasattr(self.sources[number], "retire"):
            self._handed_out.append(number)
        return self.sources[number][local]

    def sample_key(self, index: int) -> str:
        """Name of the dataset, and what identifies the sample in it."""
        number, local = self._home(index)
        key_of = getattr(self.sources[number], "sample_key", int)
        return f"{self.names[number]}/{key_of(local)}"

    def stream_ids(self, seed: int, start: int, stride: int, count: int) -> tuple[Ids, Ids]:
        """What stands at the positions `start + i · stride`.

        Args:
            seed: Seed of the run.
            start: First position over all epochs.
            stride: Distance of two positions.
            count: How many.

        Returns:
            The epoch of its own dataset that each sample belongs to, and its id in the mix; int64 `[count]` each.
        """
        positions = start + stride * np.arange(count, dtype=np.int64)
        which, turns = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        blocks = positions // BLOCK
        for block in np.unique(blocks).tolist():
            inside = blocks == block
            offsets = positions[inside] - block * BLOCK
            source, turn = _arrangement(tuple(self.shares), seed, block)
            which[inside] = source[offsets]
            turns[inside] = turn[offsets] + block * np.asarray(self.shares, dtype=np.int64)[source[offsets]]
        epochs, ids = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for number in np.unique(which).tolist():
            mine = which == number
            epochs[mine], local = self._ids_of(number, seed, turns[mine])
            ids[mine] = local + self.starts[number]
        return epochs, ids

    def _ids_of(self, number: int, seed: int, turns: Ids) -> tuple[Ids, Ids]:
        """Epoch and id of the samples that one dataset gives at its own positions, which ascend."""
        length = self.lengths[number]
        epochs, offsets = turns // length, turns % length
        ids = np.empty_like(turns)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            wanted = offsets[inside]
            first = int(wanted[0])
            order = _order(length, derive(seed, SPEC, self.names[number]), epoch)
            ids[inside] = order.ids(first, int(wanted[-1]) + 1)[wanted - first]
        return epochs, ids

    def _home(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.starts[-1]:
            raise IndexError(f"There is no sample {index} among the {self.starts[-1]} of the mix.")
        number = bisect_right(self.starts, index) - 1
        return number, index - self.starts[number]

    # -- what its datasets can do, the mix can -------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Names, shares, lengths and what the datasets say of themselves."""
        own = [getattr(source, "fingerprint", None) for source in self.sources]
        text = repr((SPEC, self.names, self.shares, self.lengths, own, self._samples))
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def data_state(self) -> dict[str, Any]:
        """What the datasets want to have in a checkpoint, by name."""
        return {
            name: source.data_state()
            for name, source in zip(self.names, self.sources, strict=True)
            if hasattr(source, "data_state")
        }

    def check_data_state(self, saved: Mapping[str, Any]) -> None:
        """Holds every dataset to what a checkpoint says of it.

        Raises:
            StateMismatchError: One has changed, or is missing.
        """
        for name, state in saved.items():
            source = dict(zip(self.names, self.sources, strict=True)).get(name)
            if source is None or not hasattr(source, "check_data_state"):
                raise StateMismatchError(f"The mix has no dataset '{name}' any more. It has {', '.join(self.names)}.")
            source.check_data_state(state)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Tells each dataset which of its samples will be asked for."""
        homes = [self._home(index) for index in indices]
        for number, source in enumerate(self.sources):
            mine = [local for home, local in homes if home == number]
            if mine and hasattr(source, "prefetch"):
                source.prefetch(mine)

    def retire(self, count: int) -> None:
        """The oldest `count` samples that were handed out are no longer in use."""
        if not any(hasattr(source, "retire") for source in self.sources):
            return
        done = [0] * len(self.sources)
        for _ in range(min(count, len(self._handed_out))):
            done[self._handed_out.popleft()] += 1
        for number, samples in enumerate(done):
            if samples:
                self.sources[number].retire(samples)

    def take_stats(self) -> DataStats:
        """What the datasets counted since the last call."""
        total = DataStats()
        for source in self.sources:
            if hasattr(source, "take_stats"):
                total.add(source.take_stats())
        return total


def _shares(names: list[str], weights: Mapping[str, float]) -> list[int]:
    """Positions of each dataset in a block, by largest remainder.

    Raises:
        ConfigError: See `Mix`.
    """
    if set(weights) != set(names):
        raise ConfigError(
            f"The mix has the datasets {', '.join(sorted(names))} and weights for {', '.join(sorted(weights))}. "
            "Give each dataset one weight."
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError(f"The weight of '{name}' in the mix is {weight!r}; it must be a number above 0.")
    total = math.fsum(weights.values())
    exact = [weights[name] / total * BLOCK for name in names]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(names)), key=lambda number: shares[number] - exact[number])
    for number in by_remainder[: BLOCK - sum(shares)]:
        shares[number] += 1
    for name, share in zip(names, shares, strict=True):
        if share < 1:
            raise ConfigError(
                f"The weight of '{name}' in the mix is {weights[name] / total:.1e} of all; less than 1/{BLOCK} cannot "
                "be kept. Give it more, or leave it out."
            )
    return shares


@functools.lru_cache(maxsize=4)
def _arrangement(shares: tuple[int, ...], seed: int, block: int) -> tuple[Ids, Ids]:
    """The dataset at each position of a block, and how often it came before in it; int64 `[BLOCK]` each.

    Stratified: the i-th of k positions of a dataset falls at random into the i-th of k equal parts of the block, so
    that any window holds about its share, and no pattern repeats that could fall together with the ranks'.
    """
    key = derive(seed, SPEC, "block", block)
    which = np.repeat(np.arange(len(shares), dtype=np.int64), shares)
    turns = np.concatenate([np.arange(share, dtype=np.int64) for share in shares])
    jitter = Order(BLOCK, key, 0).ids(0, BLOCK) / BLOCK
    place = (turns + jitter) / np.asarray(shares)[which]
    order = np.argsort(place, kind="stable")
    return which[order], turns[order]


@functools.lru_cache(maxsize=64)
def _order(samples: int, seed: int, epoch: int) -> Order:
    return Order(samples, seed, epoch)
