"""The pieces of one large file, several under way at once.

Guarantee: they come in order, and no more than `PARALLEL` are held or under way. The first that fails ends it, and so
does nobody waiting any more; a request that hangs then holds up nobody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from framework.ending import Background

if TYPE_CHECKING:
    from framework.data.files.reading import Watch

PARALLEL = 4
LOOK_SECONDS = 0.2  # between two looks at how a piece gets on


def side_by_side(
    reads: Iterable[Callable[[Watch], bytes]], watch: Watch, abandoned: type[Exception]
) -> Iterator[bytes]:
    """What each of `reads` returns, in order.

    Args:
        reads: Each reads one piece.
        watch: What is known of the whole file; kept up to date.
        abandoned: Raised if nobody waits for the file any more.

    Raises:
        Exception: What the first piece that failed raised.
    """
    rest = iter(reads)
    pending: deque[_Piece] = deque()
    try:
        while True:
            while len(pending) < PARALLEL and (read := next(rest, None)) is not None:
                pending.append(_Piece(read, type(watch)()))
            if not pending:
                return
            yield pending[0].result(watch, abandoned, pending)
            pending.popleft()
    finally:
        for piece in pending:
            piece.watch.is_abandoned = True


class _Piece:
    """One piece, in a thread of its own."""

    def __init__(self, read: Callable[[Watch], bytes], watch: Watch) -> None:
        self.watch = watch
        self._read = read
        self._data = b""
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        try:
            Background(self._run, "piece fetcher").start()
        except RuntimeError:  # this user may have no more threads
            self._run()

    def _run(self) -> None:
        try:
            self._data = self._read(self.watch)
        except BaseException as error:  # whoever waits for the piece has to hear of it
            self._error = error
        self._is_done.set()

    def result(self, watch: Watch, abandoned: type[Exception], pending: Iterable[_Piece]) -> bytes:
        """The bytes; raises what any of `pending` failed with, for this one may be tried again for long yet."""
        mine = self.watch
        is_done = False
        while not is_done:
            is_done = self._is_done.wait(LOOK_SECONDS)
            watch.moved = max(watch.moved, mine.moved)
            watch.attempts, watch.cause, watch.ticket = mine.attempts, mine.cause, mine.ticket
            if watch.is_abandoned:
                raise abandoned
            for piece in pending:
                if piece._error is not None:
                    raise piece._error
        watch.retries += mine.retries
        watch.seconds = mine.seconds
        return self._data
