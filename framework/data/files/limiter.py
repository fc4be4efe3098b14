"""How many requests a volume is asked to serve at once: fewer as soon as it says that it is too many.

Guarantee: never more requests are under way than the limit. It falls by half when the store answers 429 or 503, once for
all requests that were under way together, and rises slowly while answers are good. Whoever waits for a store that was
away is woken by the first good answer of anybody in this process.
"""

from __future__ import annotations

import os
import random
import threading
import time

FLOOR = 4.0  # requests that are always allowed: below, an answer of 503 to a third of them would stop the work
GROWTH = 0.25  # by how much the limit rises in the time in which as many requests as it allows are answered
OUTAGE = 4  # failures in a row, of all requests together, after which a good answer means that the store is back
FIRST_SECONDS, LONGEST_SECONDS = 0.1, 20.0

_jitter = random.SystemRandom()  # the default generator belongs to the samples, whose numbers must not change


class Ticket:
    """One request that is under way.

    Attributes:
        began: When it was begun, on the monotonic clock.
        is_counted: Whether it still takes room.
    """

    __slots__ = ("began", "is_counted")

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.is_counted = True


class Limiter:
    """A bound on the requests of this process to one store. Thread-safe.

    Args:
        most: The highest limit, at least 1.

    Attributes:
        limit: How many requests may be under way now.
        cuts: How often the limit was halved.
    """

    def __init__(self, most: int) -> None:
        self.most = float(most)
        self.limit = self.most
        self.cuts = 0
        self._floor = min(FLOOR, self.most)
        self._active = 0
        self._cut_at = -1.0
        self._failures = 0
        self._room = threading.Condition()
        self._back = threading.Condition()
        self._sleepers = 0

    def enter(self, timeout_seconds: float) -> Ticket | None:
        """Waits for room for one more request; none if there was none in time."""
        with self._room:
            if self._active >= self.limit:
                deadline = time.monotonic() + timeout_seconds
                while self._active >= self.limit:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._room.wait(left)
            self._active += 1
        return Ticket()

    def leave(self, ticket: Ticket, *, is_good: bool = False, is_busy: bool = False) -> None:
        """Tells how a request ended, or that nobody waits for it any more. A second time nothing happens.

        Args:
            ticket: The request.
            is_good: Whether it was answered.
            is_busy: Whether the answer was to ask for less.
        """
        is_back = False
        with self._room:
            if not ticket.is_counted:
                return
            ticket.is_counted = False
            self._active -= 1
            if is_good:
                is_back, self._failures = self._failures >= OUTAGE, 0
                if self.limit < self.most:
                    self.limit = min(self.most, self.limit + GROWTH / self.limit)
            elif not is_busy:
                self._failures += 1
            elif ticket.began >= self._cut_at:  # those begun before were already paid for
                self.limit = max(self._floor, min(self.limit, self._active + 1.0) / 2)
                self._cut_at = time.monotonic()
                self.cuts += 1
            self._room.notify()
        if is_back and self._sleepers:
            with self._back:
                self._back.notify_all()

    def pause(self, failures: int, most_seconds: float, *, is_busy: bool) -> None:
        """Waits before a request is made again: full jitter, twice as long at most after each failure.

        Args:
            failures: How often it has failed, at least 1.
            most_seconds: Never longer than this.
            is_busy: Whether the store asked for less; otherwise a good answer to another request ends the wait.
        """
        longest = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures - 1, 10), max(0.0, most_seconds))
        seconds = _jitter.uniform(0.0, longest)
        if is_busy:
            time.sleep(seconds)
            return
        with self._back:
            self._sleepers += 1
            try:
                self._back.wait(seconds)
            finally:
                self._sleepers -= 1


_limiters: dict[str, Limiter] = {}


def limiter_of(store: str, most: int) -> Limiter:
    """The limiter that all who read from a store in this process share.

    Args:
        store: Names it: the scheme and host of a URL, or the path of a mount.
        most: The highest limit of a limiter that is made now.
    """
    return _limiters.setdefault(store, Limiter(most))


os.register_at_fork(after_in_child=_limiters.clear)  # threads of the parent are in its counts, and hold its locks
