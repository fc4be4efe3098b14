"""Which process is which, for others on the same host.

Guarantee: of a process is said that it has ended only if that is certain: never of one of another host, or of another
process namespace, and never because its id is used again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, so that another one on the same host can tell whether it still lives.

    Args:
        text: Boot of the host, process namespace, process id and start time in clock ticks; empty if not known.
    """

    text: str

    @classmethod
    def own(cls) -> Identity:
        """That of this process."""
        started = _start_of(os.getpid())
        return cls("" if started is None else f"{_neighbourhood()} {os.getpid()} {started}")

    @property
    def has_ended(self) -> bool:
        """Whether it is certain that the process has ended; never for one of another host."""
        parts = self.text.split()
        if len(parts) != 4 or " ".join(parts[:2]) != _neighbourhood():
            return False
        return _start_of(int(parts[2])) != parts[3]


def _neighbourhood() -> str:
    """Names the processes whose ids mean the same here; a single blank is in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot; none if it has ended, or if that cannot be told."""
    try:
        # state is the third field and start time the 22nd; the name before them may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
