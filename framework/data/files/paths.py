"""Streams that decode local paths, as datasets whose samples have an index.

Guarantee: a sample has the index of the file that it was made of, so that the place in the data is one integer, exact
over kills and changes of workers and ranks. A class that does not give one sample for each path is refused by name.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from framework.data.files.feed import Files, PathFeed, active, not_one_to_one
from framework.data.stats import DataStats
from framework.errors import ConfigError, DataError

MOST_PARTS = 1000  # of one list or mapping in which a dataset is looked for


class PathSamples:
    """An iterable dataset that decodes the paths of a `VolumeDataset`, as a dataset whose samples have an index.

    Args:
        wrapper: The iterable dataset, or a `PathStream` itself.

    Raises:
        ConfigError: It holds no `VolumeDataset`, or several, or says that it has another length.
    """

    def __init__(self, wrapper: Any) -> None:
        files = find_volume(wrapper)
        if files is None:
            raise ConfigError(f"{type(wrapper).__name__} holds no VolumeDataset whose paths it could be given.")
        self.wrapper = wrapper
        self.files = files
        self._name = type(wrapper).__name__
        self._start()
        length = _length(wrapper)
        if length not in (None, len(files)):
            raise ConfigError(
                f"{self._name} has the length {length}, and its VolumeDataset has {len(files)} files. It must give one "
                f"sample for each path: let __len__ return the number of files, or leave it out."
            )

    def _start(self) -> None:
        self._pid = os.getpid()
        self._feed = PathFeed(self.files, self._name)
        self._iterator: Iterator[Any] | None = None
        self._taken: deque[int] = deque()  # paths that each sample in use took; more than one after an error
        self._lost = 0  # paths that were taken by samples that failed

    def __len__(self) -> int:
        return len(self.files)

    @property
    def fingerprint(self) -> str:
        """That of the files."""
        return self.files.fingerprint

    def sample_key(self, index: int) -> str:
        """The relative name of the file."""
        return self.files.sample_key(index)

    def data_state(self) -> dict[str, Any]:
        """That of the files."""
        return self.files.data_state()

    def check_data_state(self, saved: dict[str, Any]) -> None:
        """That of the files."""
        self.files.check_data_state(saved)

    def prefetch(self, indices: Sequence[int]) -> None:
        """These will be asked for later, in this order."""
        self.files.local_paths.prefetch(indices)

    def cancel_prefetch(self) -> None:
        """What was announced and not asked for yet will not be."""
        self.files.local_paths.cancel_prefetch()

    def retire(self, count: int) -> None:
        """The first `count` samples given out and not yet retired are in use no more, and so their paths."""
        self._check_process()
        paths = sum(self._taken.popleft() for _ in range(min(count, len(self._taken))))
        self.files.local_paths.retire(paths)

    def take_stats(self) -> DataStats:
        """What was counted in this process since the last call."""
        return self.files.local_paths.take_stats()

    def __getitem__(self, index: int) -> Any:
        """One sample. Raises as `fetch_many` does."""
        (sample,) = self.fetch_many(0, [index])
        return sample

    def fetch_many(self, epoch: int, ids: Sequence[int]) -> Iterator[Any]:
        """The samples of these files, each made when it is asked for.

        Args:
            epoch: Number of the epoch; the samples do not depend on it.
            ids: Which.

        Raises:
            ConfigError, DataError: The wrapper does not give one sample for each path.
            Exception: What the wrapper raised; the next call begins with a new iteration over it.
        """
        self._check_process()
        feed = self._feed
        feed.push(ids)
        try:
            for _ in ids:
                before = feed.taken
                try:
                    sample = self._next()
                finally:
                    self._lost += feed.taken - before
                self._taken.append(self._lost)
                self._lost = 0
                yield sample
            if feed.taken != len(ids):
                raise DataError(not_one_to_one(self._name, len(ids), feed.taken))
        except BaseException:
            self._iterator = None  # a generator that raised is over
            raise

    def _next(self) -> Any:
        with active(self._feed):
            if self._iterator is None:
                self._iterator = iter(self.wrapper)
            try:
                return next(self._iterator)
            except StopIteration:
                raise ConfigError(
                    f"{self._name} ended before it gave a sample for each path: it must go on as long as paths come."
                ) from None

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._start()

    def __getstate__(self) -> dict[str, Any]:
        return {"wrapper": self.wrapper, "files": self.files, "_name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def with_index(dataset: Any) -> Any:
    """The dataset, or where it is an iterable one around a `VolumeDataset`, that as one whose samples have an index."""
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset) and find_volume(dataset) is not None
    return PathSamples(dataset) if is_stream else dataset


def find_volume(dataset: Any, depth: int = 2) -> Files | None:
    """The `VolumeDataset` that an object holds, in attributes of attributes, and in lists and mappings there.

    Raises:
        ConfigError: It holds several.
    """
    found: dict[int, Any] = {}
    _look(dataset, depth, found, set())
    if len(found) > 1:
        raise ConfigError(
            f"{type(dataset).__name__} holds {len(found)} VolumeDatasets, so that one sample is no longer one path. Mix "
            f"datasets with framework.data.Mix, or read files of the others by their name."
        )
    return next(iter(found.values()), None)


def _look(value: Any, depth: int, found: dict[int, Any], seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, type | torch.Tensor | np.ndarray | str | bytes):
        return
    seen.add(id(value))
    if callable(getattr(type(value), "path_stream", None)):
        found[id(value)] = value
        return
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        if depth == 0:
            return
        depth -= 1
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    for part in list(itertools.islice(parts, MOST_PARTS)):
        _look(part, depth, found, seen)


def _length(wrapper: Any) -> int | None:
    try:
        return len(wrapper)
    except TypeError:  # it has none
        return None
