"""Local paths of the files of a dataset, for code that opens them itself.

Guarantee: a path that was given out stays valid until it is retired. Where nobody says what is in use no more, as with
torch's own loader, the oldest are retired once `kept` were given out after them, so that the disk does not fill; what a
worker gave last outlives it until the next epoch, since its batches are still on their way when it ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from framework.data.files.source import FileSource
from framework.data.stats import DataStats

KEPT = 1024  # paths that stay valid where nobody keeps books


class LocalPaths:
    """Gives files as paths. A copy in another process, a forked one too, begins with nothing given out.

    Args:
        source: Gives the files; made for paths.

    Attributes:
        kept: How many paths stay valid where nobody calls `retire`.
    """

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self.kept = KEPT
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._given = 0  # that are in use, as far as this knows
        self._has_books = False

    def path_of(self, index: int) -> str:
        """A local path of a file.

        Raises:
            DataError: It could not be read, or is not as it was listed; the message names it.
        """
        if self._pid != os.getpid():
            self._start()
        path = self._source.path_of(index, is_left=not self._has_books)
        self._given += 1
        if not self._has_books and self._given > self.kept:
            self._source.retire(1)
            self._given -= 1
        return path

    def prefetch(self, indices: Sequence[int]) -> None:
        """These will be asked for later, in this order. Cheap; never raises."""
        self._source.prefetch(indices)

    def cancel_prefetch(self) -> None:
        """What was announced and not asked for yet will not be."""
        self._source.cancel_prefetch()

    def retire(self, count: int) -> None:
        """The first `count` paths given out and not yet retired are in use no more.

        From the first call on, with 0 too, all others stay valid until they are retired by it.
        """
        if self._pid != os.getpid():
            self._start()
        self._has_books = True
        self._given -= count
        self._source.retire(count)

    def take_stats(self) -> DataStats:
        """What was counted in this process since the last call."""
        return self._source.take_stats()
