"""What loading did: counts that add up over workers, and how long reads took.

Guarantee: adding is exact for counts; a quantile of read times is right within 10 %, whatever the number of reads, in
constant memory. Records are small and picklable: a worker sends one beside each batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_BASE = 1.1  # each bucket of read times is 10 % wider than the one below
_SMALLEST = 1e-6  # seconds


@dataclass(slots=True)
class DataStats:
    """Counts since the last time they were taken.

    Args:
        samples: Samples that were loaded.
        cache_hits: Files that were in the local cache.
        cache_misses: Files that had to be fetched.
        bytes_fetched: Bytes that came from the volume.
        retries: Requests to the volume that were made again.
        skipped: Samples that could not be loaded and were passed over or replaced.
        worker_restarts: Workers that died and were replaced.
        reads: How many reads took how long: bucket → count, see `add_read`.
    """

    samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    skipped: int = 0
    worker_restarts: int = 0
    reads: dict[int, int] = field(default_factory=dict)

    def add_read(self, seconds: float) -> None:
        """Counts one read of a file from the volume that took `seconds`."""
        bucket = math.ceil(math.log(max(seconds, _SMALLEST) / _SMALLEST, _BASE))
        self.reads[bucket] = self.reads.get(bucket, 0) + 1

    def add(self, other: DataStats) -> None:
        """Adds what another record counted."""
        for each in fields(self):
            if each.name != "reads":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for bucket, count in other.reads.items():
            self.reads[bucket] = self.reads.get(bucket, 0) + count

    def take(self) -> DataStats:
        """What was counted so far; counting starts again from nothing."""
        taken = DataStats()
        taken.add(self)
        for each in fields(self):
            setattr(self, each.name, {} if each.name == "reads" else 0)
        return taken

    def read_seconds(self, quantile: float) -> float | None:
        """A quantile of the read times in seconds, for example 0.95; none if nothing was read."""
        total = sum(self.reads.values())
        below = 0
        for bucket in sorted(self.reads):
            below += self.reads[bucket]
            if below >= quantile * total:
                return _SMALLEST * _BASE**bucket
        return None

    def to_json(self) -> dict[str, Any]:
        """As JSON values; buckets are text there."""
        return {**asdict(self), "reads": {str(bucket): count for bucket, count in self.reads.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DataStats:
        """What `to_json` gave; fields that are missing or no numbers count as nothing, others are passed over."""
        counts = {
            each.name: int(values[each.name])
            for each in fields(cls)
            if each.name != "reads" and isinstance(values.get(each.name), int)
        }
        reads = values.get("reads")
        known = {
            int(bucket): int(count)
            for bucket, count in (reads.items() if isinstance(reads, Mapping) else ())
            if str(bucket).lstrip("-").isdecimal() and isinstance(count, int)
        }
        return cls(**counts, reads=known)

    @property
    def hit_rate(self) -> float | None:
        """Files that the cache had, as a fraction of all; none if no file was asked for."""
        asked = self.cache_hits + self.cache_misses
        return self.cache_hits / asked if asked else None
