"""Which process left a file behind, and whether it still runs.

Guarantee: a live process is never taken for a dead one, whichever container it is in; a later process with the same pid
is not taken for it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from pathlib import Path

import psutil

TOKEN = re.compile(r"([0-9a-f]{12})\.(\d+)\.(\d+)")


def token(pid: int | None = None) -> str:
    """The name of a process, by default this one, among all of all machines: no dash, no slash."""
    return _token(os.getpid() if pid is None else pid)


@functools.lru_cache(maxsize=4)
def _token(pid: int) -> str:
    return f"{_machine(os.getpid())}.{pid}.{_started(pid) or 0}"


def is_alive(name: str) -> bool | None:
    """Whether the process that a text begins with still runs; none where that cannot be told from here."""
    match = TOKEN.match(name)
    if match is None or match[1] != _machine(os.getpid()):
        return None
    return _started(int(match[2])) == int(match[3])


@functools.lru_cache(maxsize=1)
def _machine(pid: int) -> str:
    """Of processes that see each other by pid: one boot of one machine, one container."""
    try:
        seen = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        seen = socket.gethostname()
    return hashlib.blake2b(seen.encode(), digest_size=6).hexdigest()


def _started(pid: int) -> int | None:
    """When a process was started, in a unit of its own; none if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError, ValueError):
        pass
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except psutil.NoSuchProcess:
        return None
