"""What a stream offers whose place in the data can be taken over by any number of readers.

Guarantee: everything that crosses this line is plain values, a pure function of its arguments, and small. A stream of
this kind keeps no state of its own between two calls, so that one object serves every epoch, every reader and every
resume, in the main process and in workers alike.

How it is driven. An epoch of `len(stream)` samples is cut into *shares*, one for each *consumer*: `shares[c]` samples
for consumer `c`, `c = rank · workers + worker` (one worker where loading happens in the main process). Consumers need
not know of each other: each calls `begin` with the same `epoch`, `seed`, `done` and `shares` and with its own number.

    fresh epoch                    done = None, taken = 0, sum(shares) == len(stream)
    resumed, same consumers        the same done and shares as before, taken = what this consumer has given
    resumed, other consumers       done = merge(..., done=old done, shares=old shares, taken=what each has given),
                                   new shares of what is left, taken = 0

Ranks stay in step because the shares follow the positions: rank `r` of `w` has as many samples of the epoch as there
are positions of it that belong to rank `r`. Hence shares differ by at most the number of workers, and may be 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

Done = dict[str, Any]  # plain values that a checkpoint holds: numbers, strings, lists and dicts with string keys


@runtime_checkable
class MergeableStream(Protocol):
    """A stream that can be cut anew, at any sample, over any number of consumers. It is recognised by these methods.

    Attributes (both optional):
        fingerprint: `str`, stored with the checkpoint; another one is refused on resume.
        take_stats: `() -> DataStats`, what was counted in this process since the last call.
    """

    def __len__(self) -> int:
        """Samples of one epoch over all consumers."""

    def begin(
        self, epoch: int, *, seed: int, done: Done | None, shares: Sequence[int], consumer: int, taken: int
    ) -> Iterator[tuple[int, Any]]:
        """The samples of one consumer in one epoch, from its `taken`-th on: `shares[consumer] - taken` of them.

        The same arguments give the same samples in the same order, bit for bit. Over all consumers, and after any
        chain of `merge`, each sample of the epoch comes once.

        Args:
            epoch: Number of the epoch, from 0.
            seed: Seed of the run.
            done: What of this epoch was given before the shares were cut; none at its beginning.
            shares: Samples of each consumer, `sum(shares)` being all that is not done; any may be 0.
            consumer: Number of this consumer, 0 to `len(shares) - 1`.
            taken: How many of its samples this consumer has given already: they are passed over, as cheaply as can be.

        Yields:
            Id of the sample (0 to `len(self) - 1`, the same in every epoch), and the sample: what `collate` gets. Before
            a sample is made the default generators are seeded with `seed_sample(sample_key(seed, epoch, key))`, `key`
            being its id or name, so that its random numbers do not depend on who makes it. Where a sample cannot be
            made, the exception stands in its place and the iteration goes on: `loader.on_error` decides what happens.

        Raises:
            DataError: The stream cannot be read.
        """

    def merge(self, epoch: int, *, seed: int, done: Done | None, shares: Sequence[int], taken: Sequence[int]) -> Done:
        """What of an epoch is done once each consumer `c` has given `taken[c]` of its `shares[c]` samples.

        Small: in the order of the number of shards and of consumers, not of samples.

        Args:
            epoch, seed, done, shares: As all consumers gave them to `begin`.
            taken: Samples that each consumer has given, `[len(shares)]`.
        """
