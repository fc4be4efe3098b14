"""How lengths of time and counts are written, and in which order categories are named.

Guarantee: plain text, without a look at the clock.
"""

from __future__ import annotations

from framework.goodput.accounts.results import Goodput

MESSAGE_LENGTH = 200  # of a message that is shown, in characters


def duration(seconds: float) -> str:
    """A length of time as people say it: `0.2 s`, `3 min 12 s`, `2 h 05 min`, `3 d 04 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def first_line(text: object) -> str:
    """The first line of a message that may have many, cut to what fits; empty for none."""
    return (str(text or "").strip().splitlines() or [""])[0][:MESSAGE_LENGTH]


def ranked(goodput: Goodput) -> list[tuple[str, float]]:
    """The categories that took any time and their seconds, the biggest first."""
    return sorted(((n, s) for n, s in goodput.seconds.items() if s > 0), key=lambda item: -item[1])


def biggest_losses(goodput: Goodput) -> list[str]:
    """The shares of the three categories that took most beside productive steps, as one text; none if there are none."""
    wasted = sorted(((s, n) for n, s in goodput.seconds.items() if n != "productive" and s > 0), reverse=True)[:3]
    return [", ".join(f"{name} {seconds / goodput.wall:.1%}" for seconds, name in wasted)] if wasted else []
