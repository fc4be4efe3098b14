"""Shards of samples as a stream that any number of readers share, and that goes on at any sample with any other number.

Guarantee: an epoch gives every sample once over all readers, whoever they are, wherever they stop and however many go
on; its order depends on the seed and the epoch alone. What is done of it is a few intervals of that order: finished
shards, and how far the others are. Damage is named by shard and byte. It offers the methods by which streams of this
kind are driven (`framework.data.streams.protocol`), and holds nothing between two calls of them.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from framework.data.cache import LocalCache, open_cache
from framework.data.files.listing import found_by_one
from framework.data.files.manifest import Difference, Manifest
from framework.data.files.source import is_on_disk
from framework.data.seeding import sample_key, seed_sample
from framework.data.shards import index
from framework.data.shards.base import Bytes, Samples
from framework.data.shards.decoding import AUTO, JSON, PARQUET, TAR, decoded, picked
from framework.data.shards.listing import check_format, shards_of
from framework.data.shards.opening import ShardFiles
from framework.data.shards.parquet import ParquetSamples
from framework.data.shards.reading import Raw, ShardReader, buffered
from framework.data.shards.sequence import SPEC, EpochSequence, Interval, is_in_order, joined, left_of, part_of
from framework.data.shards.tar import TarSamples
from framework.data.shards.text import TextSamples
from framework.data.stats import DataStats
from framework.duration import SECONDS, Duration
from framework.errors import ConfigError, DataError, FrameworkError, StateMismatchError, suggest
from framework.volume import open_volume

BUFFER = 1000  # samples that are shuffled among each other
MOST_STATE = 64 << 20  # bytes of a list that a checkpoint takes

# Not the fault of one sample: passing over it would hide what is wrong with all of them.
_NEVER_PASSED_OVER = (MemoryError, torch.OutOfMemoryError, NameError, ImportError)

log = logging.getLogger(__name__)


class ShardStream(IterableDataset[Any]):
    """Samples of shards: tar files as webdataset lays them out, parquet files, or lines of text.

    The shards are listed and their samples counted when this object is made, by rank 0 for all ranks that have joined.
    A sample is known by its number: those of the shards before it, by the bytes of their names, and its own.

    Args:
        source: A path, or a URL: `s3://bucket/prefix`, `gs://`, `az://`, `http(s)://`, `file://`.
        format: `tar`, `parquet`, `text`, or `auto`: by the endings of the names.
        pattern: Which files below the source are shards, with `*` and `?`: `train-*.tar`; default all of the format.
        decode: `auto`: files in a tar by their endings (images to uint8 `[3, height, width]`, `cls` to a number, `json`,
            `txt`, `npy`; else bytes), lines of `.jsonl` as JSON; `json`: lines as JSON; a function of the sample as it
            is stored; none: as it is stored, which is a dict with `__key__` and bytes, a dict of columns, or a `str`.
        fields: Names of what is wanted of each sample, which is then a tuple of it; `jpg;png` takes the first that there
            is. Of parquet only these columns are read.
        transform: Called with each decoded sample, default none.
        samples: Samples of each shard, if they are known: a number for all, one for each, or by name; default counted.
        shuffle_shards: Whether every epoch has another order of the shards.
        buffer: Samples that are held and shuffled among each other; 1: none.
        list_timeout: How long to wait for the first file, which may show late.
        cache: Where shards are kept: a folder, a mapping of the arguments of `LocalCache`, or one; false: nowhere;
            default that of the user, except for files on a local disk, which are read where they are.
        options: Settings of the object store, by the names that obstore knows.

    Attributes:
        manifest: The shards.
        counts: Samples of each, int64 `[shards]`.

    Raises:
        ConfigError: An argument makes no sense, or the shards are of several formats or compressed.
        DataError: There are no shards or no samples, or a shard is damaged.
        VolumeError: There is no such kind of URL, or the store cannot be listed.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        format: str = AUTO,
        pattern: str | None = None,
        decode: str | Callable[[Any], Any] | None = AUTO,
        fields: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        samples: int | Sequence[int] | Mapping[str, int] | None = None,
        shuffle_shards: bool = True,
        buffer: int = BUFFER,
        list_timeout: str = "60s",
        cache: LocalCache | Mapping[str, Any] | str | Path | bool | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        check_format(format)
        _check(decode, fields, buffer)
        seconds = Duration.parse(list_timeout, key="list_timeout", allow=(SECONDS,)).value
        volume = open_volume(source, retry_seconds=seconds, options=options)
        self.place = str(volume.path) if volume.path is not None else volume.place
        self.decode = decode
        self.fields = None if fields is None else list(fields)
        self.transform = transform
        self.shuffle_shards = shuffle_shards
        self.buffer = buffer
        self.manifest, self.format = shards_of(volume, format, pattern, seconds)
        has_default_cache = cache is None and is_on_disk(volume.path)
        self._files = ShardFiles(
            self.place, dict(options or {}), self.manifest, None if has_default_cache else open_cache(cache)
        )
        self._make = _maker(self.format, self.fields)
        if samples is None:
            self.counts = found_by_one(
                self.place,
                lambda: index.counted(self._files, self._make, self.format, has_default_cache=has_default_cache),
            )
        else:
            self.counts = index.told(samples, self.manifest)
        self._starts = np.cumsum(self.counts) - self.counts
        self._samples = int(self.counts.sum())
        if not self._samples:
            raise DataError(f"The {len(self.manifest)} shards of {self.place} have no samples.")
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Samples of an epoch, over all readers."""
        return self._samples

    def __iter__(self) -> Iterator[Any]:
        """This rank's and worker's share of epoch 0, to look at: a loader of this package does not use it."""
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        is_joined = dist.is_available() and dist.is_initialized()
        world, rank = (dist.get_world_size(), dist.get_rank()) if is_joined else (1, 0)
        readers, number = world * workers, rank * workers + worker
        shares = [(self._samples + readers - 1 - reader) // readers for reader in range(readers)]
        for _, sample in self.begin(0, seed=0, done=None, shares=shares, consumer=number, taken=0):
            if isinstance(sample, Exception):
                raise sample
            yield sample

    # -- shares ------------------------------------------------------------------------------------------------------

    def begin(
        self, epoch: int, *, seed: int, done: dict[str, Any] | None, shares: Sequence[int], consumer: int, taken: int
    ) -> Iterator[tuple[int, Any]]:
        """The samples of one reader in one epoch, with their numbers; see `MergeableStream.begin`."""
        left = left_of(self._intervals(done, shares), self._samples)
        part = part_of(left, sum(shares[:consumer]) + taken, shares[consumer] - taken)
        return self._given(epoch, seed, part)

    def merge(
        self, epoch: int, *, seed: int, done: dict[str, Any] | None, shares: Sequence[int], taken: Sequence[int]
    ) -> dict[str, Any]:
        """What of an epoch is done when each reader has given so many of its samples; see `MergeableStream.merge`."""
        before = self._intervals(done, shares)
        left = left_of(before, self._samples)
        given = list(before)
        first = 0
        for share, count in zip(shares, taken, strict=True):
            given += part_of(left, first, count)
            first += share
        return {
            "spec": SPEC,
            "shuffle_shards": self.shuffle_shards,
            "buffer": self.buffer,
            "intervals": [list(interval) for interval in joined(given)],
        }

    def take_stats(self) -> DataStats:
        """What was counted in this process since the last call."""
        return self._files.take_stats()

    def _given(self, epoch: int, seed: int, part: list[Interval]) -> Iterator[tuple[int, Any]]:
        sequence = EpochSequence(self.counts, seed, epoch, shuffle_shards=self.shuffle_shards, buffer=self.buffer)
        reader = ShardReader(self._files, self._make, self.counts, lambda shard: sequence.following(shard, part))
        try:
            for raw in buffered(reader.read, sequence.windows(part)):
                number = int(self._starts[raw.shard]) + raw.index
                if not isinstance(raw.content, Exception):
                    seed_sample(sample_key(seed, epoch, number))
                yield number, self._sample(raw)
        finally:
            reader.close()

    def _sample(self, raw: Raw) -> Any:
        """The sample, or the error that stands in its place."""
        content = raw.content
        if isinstance(content, Exception):
            return content
        try:
            sample = decoded(content, self.decode, self.format, self.manifest.name(raw.shard))
            if self.fields is not None:
                sample = picked(sample, self.fields)
            return sample if self.transform is None else self.transform(sample)
        except Exception as error:
            is_bug = isinstance(error, FrameworkError) and not isinstance(error, DataError)
            if is_bug or isinstance(error, _NEVER_PASSED_OVER):
                raise
            key = f" ('{content['__key__']}')" if self.format == TAR else ""
            failure = DataError(
                f"{self._files.shown(raw.shard)}, sample {raw.index} of {self.counts[raw.shard]}{key}: "
                f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            return failure

    def _intervals(self, done: dict[str, Any] | None, shares: Sequence[int]) -> list[Interval]:
        """What is done, checked.

        Raises:
            DataError: It is not of these shards, or the shares are not what is left.
        """
        intervals: list[Interval] = []
        if done is not None:
            order = (done["spec"], done["shuffle_shards"], done["buffer"])
            if order != (SPEC, self.shuffle_shards, self.buffer):
                raise DataError(
                    f"The place in {self.place} was kept for another order of the samples: {_order(*order)} then, "
                    f"{_order(SPEC, self.shuffle_shards, self.buffer)} now. Use the same, or begin at the end of an epoch."
                )
            intervals = [(int(start), int(stop)) for start, stop in done["intervals"]]
        count = sum(stop - start for start, stop in intervals)
        if not is_in_order(intervals, self._samples) or sum(shares) != self._samples - count:
            raise DataError(
                f"The place in {self.place} does not fit it: {count:,} of {self._samples:,} samples are done, and "
                f"{sum(shares):,} are to come. The shards have changed, or the checkpoint is damaged."
            )
        return intervals

    # -- the data of a checkpoint ------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Of the shards, their counts and the order: stored with the checkpoint, and compared on resume."""
        order = _order(SPEC, self.shuffle_shards, self.buffer)
        digest = hashlib.blake2b(f"{self.manifest.fingerprint}|{self.format}|{order}|".encode(), digest_size=16)
        digest.update(self.counts.astype("<i8").data)
        return digest.hexdigest()

    def data_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data: plain values, the list of shards and their counts compressed."""
        if self._state is None:
            packed = zlib.compress(self.manifest.pack(is_portable=True), 1)
            counts = zlib.compress(self.counts.astype("<i8").tobytes(), 1)
            is_kept = len(packed) + len(counts) < MOST_STATE
            self._state = {
                "fingerprint": self.fingerprint,
                "shards": len(self.manifest),
                "samples": self._samples,
                "order": _order(SPEC, self.shuffle_shards, self.buffer),
                "manifest": packed if is_kept else None,
                "counts": counts if is_kept else None,
            }
        return self._state

    def check_data_state(self, saved: dict[str, Any]) -> None:
        """Compares with what a checkpoint keeps.

        Args:
            saved: From `data_state`.

        Raises:
            StateMismatchError: The shards or their order differ; the message says how.
        """
        if saved["fingerprint"] == self.fingerprint:
            return
        parts: list[str] = []
        shards = len(self.manifest)
        if (saved["shards"], saved["samples"]) != (shards, self._samples):
            parts.append(
                f"{shards:,} shards of {self._samples:,} samples now, {saved['shards']:,} of {saved['samples']:,} then"
            )
        if saved["manifest"] is not None:
            before = Manifest.unpack(zlib.decompress(saved["manifest"]))
            if before.fingerprint != self.manifest.fingerprint:
                parts.append(str(Difference.between(self.manifest, before)))
            elif not np.array_equal(np.frombuffer(zlib.decompress(saved["counts"]), dtype="<i8"), self.counts):
                parts.append("other counts of samples")
        order = _order(SPEC, self.shuffle_shards, self.buffer)
        if saved["order"] != order:
            parts.append(f"{order} now, {saved['order']} then")
        raise StateMismatchError(
            f"The shards of {self.place} changed since the checkpoint: {'; '.join(parts) or 'other names'}. Samples would "
            f"be repeated or left out. Bring them back, use another run.name, or permit it with run.allow=[data]."
        )


def _maker(format: str, fields: Sequence[str] | None) -> Callable[[Bytes], Samples]:
    if format == PARQUET:
        return partial(ParquetSamples, columns=fields)
    return TarSamples if format == TAR else TextSamples


def _order(spec: str, shuffle_shards: bool, buffer: int) -> str:
    return f"order {spec}, shuffle_shards={str(shuffle_shards).lower()}, buffer={buffer}"


def _check(decode: Any, fields: Any, buffer: int) -> None:
    if not (decode is None or callable(decode) or decode in (AUTO, JSON)):
        raise ConfigError(
            f"decode={decode!r} is none of '{AUTO}', '{JSON}', no function, and not null.{suggest(str(decode), (AUTO, JSON))}"
        )
    if isinstance(fields, str) or not (fields is None or all(isinstance(one, str) and one for one in fields)):
        raise ConfigError(f"fields={fields!r} must be a list of names such as [jpg, cls].")
    if not isinstance(buffer, int) or buffer < 1:
        raise ConfigError(f"buffer={buffer!r} must be a number of samples of at least 1.")
