"""Which ranks see the same disk: hosts may share the run directory, or have one each.

Guarantee: all ranks get the same answer, found out with a file that rank 0 writes and others look for, in bounded time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from framework.distributed import Group
from framework.errors import CheckpointError

LOOK_SECONDS = 5.0  # network mounts may show a new file late


@dataclass(frozen=True, slots=True)
class Homes:
    """The disks under the run directory.

    Args:
        leaders: For each rank the lowest rank that has the same disk: it acts for it.
    """

    leaders: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see the same run directory."""
        return set(self.leaders) == {0}

    def sees(self, rank: int) -> bool:
        """Whether rank 0 sees the files of a rank."""
        return self.leaders[rank] == 0


def find_homes(group: Group, folder: Path) -> Homes:
    """Finds out which ranks share a folder with rank 0. A collective.

    Args:
        group: All ranks.
        folder: The folder of checkpoints; rank 0 makes it.

    Raises:
        CheckpointError: Rank 0 cannot write there; the same on all ranks.
    """
    world = group.world
    if world.size == 1:
        return Homes((0,))
    token, error = f".home-{uuid.uuid4().hex}", None
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).write_bytes(b"")
        except OSError as problem:
            error = f"Checkpoints cannot be written to {folder}: {problem.strerror or problem}. Choose another run.dir."
    token, error = group.broadcast((token, error))
    if error is not None:
        raise CheckpointError(error)
    is_seen = world.is_main or _looks(folder / token)
    answers = group.all_gather((is_seen, f"{socket.gethostname()}:{folder.absolute()}"))
    if world.is_main:
        with contextlib.suppress(OSError):
            os.unlink(folder / token)
    first: dict[str, int] = {}
    leaders = [0 if seen else first.setdefault(host, rank) for rank, (seen, host) in enumerate(answers)]
    return Homes(tuple(leaders))


def _looks(path: Path) -> bool:
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if path.name in os.listdir(path.parent):  # a listing is fresher than what is known of one name
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
