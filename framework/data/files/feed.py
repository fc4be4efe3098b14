"""Which paths come next, told by the loader to whatever code takes them.

Guarantee: code that iterates over the files of a dataset while the loader asks it for a sample gets the paths of the
samples that are due, in order, and no others; everywhere else the files are iterated as if there were no loader.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from framework.data.files.local_paths import LocalPaths
from framework.errors import ConfigError


class Files(Protocol):
    """What a `VolumeDataset` is to this module."""

    local_paths: LocalPaths

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...
    def sample_key(self, index: int) -> str: ...
    def data_state(self) -> dict[str, Any]: ...
    def check_data_state(self, saved: dict[str, Any]) -> None: ...


class PathFeed:
    """Tells a wrapped stream which files come: those that the loader asks for.

    Args:
        files: The dataset.
        name: Of the class that takes the paths, for errors.
    """

    def __init__(self, files: Files, name: str) -> None:
        self.files = files
        self.taken = 0
        self._name = name
        self._due: deque[int] = deque()
        self._asked = 0

    def push(self, ids: Sequence[int]) -> None:
        """These come next; what was not taken before is dropped."""
        self._due = deque(ids)
        self._asked = len(ids)
        self.taken = 0

    def paths(self) -> Iterator[str]:
        """The paths, for ever: what comes next is known only when it is asked for.

        Raises:
            ConfigError: More are asked for than samples are.
        """
        while True:
            if not self._due:
                raise ConfigError(not_one_to_one(self._name, self._asked, f"more than {self._asked}"))
            index = self._due.popleft()
            self.taken += 1
            yield self.files.local_paths.path_of(index)


def not_one_to_one(name: str, samples: int, paths: object) -> str:
    """What is wrong with a class that does not give one sample for each path."""
    return (
        f"{name} is not one-to-one: it took {paths} path{'s' * (paths != 1)} for {samples} "
        f"sample{'s' * (samples != 1)}, so that the position in the data would be wrong. Give exactly one sample for each "
        f"path, in the same order, without reading ahead. For files that cannot be decoded let the error through and set "
        f"loader.on_error=skip or substitute; to leave files out for good use VolumeDataset(extensions=…)."
    )


_feeds: list[PathFeed] = []  # those that are asked for a sample right now, the innermost last


@contextlib.contextmanager
def active(feed: PathFeed) -> Iterator[None]:
    _feeds.append(feed)
    try:
        yield
    finally:
        _feeds.pop()


def active_feed(files: Files) -> PathFeed | None:
    return next((feed for feed in reversed(_feeds) if feed.files is files), None)
