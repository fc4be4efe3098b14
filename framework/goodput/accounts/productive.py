"""When time was productive, and on how many ranks: what windows and the goodput by capacity are made of.

Guarantee: whole nanoseconds, so that what is taken back leaves nothing behind. A window begins on a whole minute of the
run: it is up to a minute longer than its name says. Memory grows by one number per minute of the run.
"""

from __future__ import annotations

MINUTE = 60 * 10**9
LONG = 60  # minutes; few steps take longer, and those are kept as they are


class Productive:
    """Productive time, which can be taken back.

    Attributes:
        by_ranks: Nanoseconds, each times the ranks that worked in it.
    """

    def __init__(self) -> None:
        self.by_ranks = 0
        self._minutes: dict[int, int] = {}
        self._long: dict[tuple[int, int], int] = {}

    def add(self, start: int, end: int, ranks: int, sign: int) -> None:
        """Adds a stretch, or takes it back.

        Args:
            start: Its beginning, nanoseconds since the run started.
            end: Its end.
            ranks: How many ranks worked.
            sign: 1, or -1 to take back.
        """
        self.by_ranks += sign * (end - start) * ranks
        first, last = start // MINUTE, (end - 1) // MINUTE
        if first == last:
            self._minutes[first] = self._minutes.get(first, 0) + sign * (end - start)
        elif last - first > LONG:
            self._long[start, end] = self._long.get((start, end), 0) + sign
        else:
            for minute in range(first, last + 1):
                length = min(end, (minute + 1) * MINUTE) - max(start, minute * MINUTE)
                self._minutes[minute] = self._minutes.get(minute, 0) + sign * length

    def ratio(self, end: int, seconds: int) -> float:
        """The productive share of the last seconds, or of the whole run if it is shorter.

        Args:
            end: The end of the run so far, nanoseconds since it started.
            seconds: Length of the window.
        """
        first = max(0, (end - seconds * 10**9) // MINUTE)
        begin = first * MINUTE
        if end <= begin:
            return 0.0
        found = sum(self._minutes.get(minute, 0) for minute in range(first, end // MINUTE + 1))
        found += sum(count * max(0, stop - max(start, begin)) for (start, stop), count in self._long.items())
        return found / (end - begin)
