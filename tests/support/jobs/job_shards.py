"""The job's samples out of shards.

Guarantee: the sample with the number `i` is sample `i` of `job.Samples`, noise included.
"""

from __future__ import annotations

from typing import Any

from job import Samples


class Numbered:
    """Makes a sample of what a shard holds: `(number,)`."""

    def __init__(self, samples: int = 96) -> None:
        self._samples = Samples(samples)

    def __call__(self, stored: tuple[int]) -> dict[str, Any]:
        return self._samples[int(stored[0])]
