"""The order in which an epoch visits its samples: a keyed permutation that is computed, never stored.

Guarantee: for a given number of samples, seed and epoch, `Order.ids` is the same on every machine and in every
version of this package and of its libraries (the spec is frozen under the name `SPEC`; the tests hold golden
vectors), visits every sample exactly once, and costs the same wherever it starts.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

SPEC = "feistel8/1"
ROUNDS = 8  # 3 or 4 leave visible structure (chi-square p < 1e-180); 6 and more do not
SORT_LIMIT = 65_536  # up to here a sort by hash is quick, and no Feistel network is uniform on very few samples
CHUNK = 65_536  # positions computed at once: large enough for numpy, small enough for the cache of a core
BLOCK = 8_192  # positions kept: neighbouring batches share one computation

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

_HALF = np.uint64(32)


class Order:
    """The order in which one epoch visits its samples.

    Up to `SORT_LIMIT` samples they are sorted by a hash. Above, a generalised Feistel network permutes Z_a × Z_b with
    `a·b >= samples` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); the few results that are no
    sample are permuted again until they are one.

    Args:
        samples: Number of samples in the dataset, at least 1.
        seed: Seed of the run, any integer.
        epoch: Number of the epoch, from 0.

    Raises:
        ValueError: `samples` is smaller than 1.
    """

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        if samples < 1:
            raise ValueError(f"An order of {samples} samples was asked for; it needs at least 1.")
        self.samples = samples
        self._keys = _round_keys(seed, epoch)
        self._table: Ids | None = None
        if samples <= SORT_LIMIT:
            hashes = _mix(np.arange(samples, dtype=np.uint64) * _GOLDEN + self._keys[:1])
            self._table = np.argsort(hashes, kind="stable").astype(np.int64)
        self._rows = math.isqrt(samples - 1) + 1
        self._columns = -(-samples // self._rows)
        self._blocks: dict[int, Ids] = {}

    def ids(self, start: int, stop: int, stride: int = 1) -> Ids:
        """The ids of the samples at the offsets `start, start + stride, …` below `stop` of this epoch.

        Args:
            start: First offset, 0 to `samples`.
            stop: Offset after the last, `start` to `samples`.
            stride: Distance of two offsets, at least 1.

        Returns:
            Ids, each 0 to `samples - 1`, int64 `[ceil((stop - start) / stride)]`.

        Raises:
            ValueError: The offsets are not within the epoch.
        """
        if not (0 <= start <= stop <= self.samples and stride >= 1):
            raise ValueError(
                f"Offsets {start} to {stop} by {stride} are not within an epoch of {self.samples} samples."
            )
        if self._table is not None:
            return self._table[start:stop:stride].copy()
        if stop - start <= BLOCK // 8:  # a batch: cheaper out of a block that the next batches use too
            return self._from_blocks(start, stop)[::stride]
        chunks = [
            self._permute(np.arange(first, min(first + CHUNK * stride, stop), stride, dtype=np.uint64))
            for first in range(start, stop, CHUNK * stride)
        ]
        return np.concatenate(chunks)

    def _from_blocks(self, start: int, stop: int) -> Ids:
        first = start // BLOCK
        parts = [
            self._block(number)[max(start - number * BLOCK, 0) : stop - number * BLOCK]
            for number in range(first, (max(stop, start + 1) - 1) // BLOCK + 1)
        ]
        return np.concatenate(parts)

    def _block(self, number: int) -> Ids:
        if number not in self._blocks:
            if len(self._blocks) == 2:
                del self._blocks[next(iter(self._blocks))]
            first = number * BLOCK
            self._blocks[number] = self._permute(np.arange(first, min(first + BLOCK, self.samples), dtype=np.uint64))
        return self._blocks[number]

    def _permute(self, offsets: Words) -> Ids:
        values = self._feistel(offsets)
        outside = np.flatnonzero(values >= np.uint64(self.samples))
        while outside.size:
            values[outside] = self._feistel(values[outside])
            outside = outside[values[outside] >= np.uint64(self.samples)]
        return values.astype(np.int64)

    def _feistel(self, values: Words) -> Words:
        sizes = (np.uint64(self._rows), np.uint64(self._columns))
        row = values // sizes[1]
        halves = [row, values - row * sizes[1]]
        for number in range(ROUNDS):
            side = number % 2
            size = sizes[side]
            # The upper 32 bits of the hash, scaled to [0, size): a multiplication instead of a slow remainder.
            shift = ((_mix(halves[1 - side] + self._keys[number]) >> _HALF) * size) >> _HALF
            total = halves[side] + shift
            halves[side] = np.minimum(total, total - size)  # modulo size: below it, the difference wraps to huge
        values = halves[0] * sizes[1] + halves[1]
        return values


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _round_keys(seed: int, epoch: int) -> Words:
    """Keys of the rounds. Seed and epoch are hashed, never added: else (seed, epoch + 1) equals (seed + 1, epoch)."""
    digest = hashlib.blake2b(f"{SPEC}|{seed}|{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(values: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words. Overwrites its argument."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
