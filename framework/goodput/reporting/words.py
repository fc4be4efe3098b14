"""How lengths of time and counts are written.

Guarantee: plain text, without a look at the clock.
"""

from __future__ import annotations


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
