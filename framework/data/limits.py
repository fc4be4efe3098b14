"""What the machine allows a loader: open files, and memory that processes share.

Guarantee: limits that this process may raise are raised before workers start; one that is too small for what is under
way is told once, with the numbers, by the first batch, instead of by the death of a worker in the middle of a run.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from framework.data.device import map_tensors

SHARED_MEMORY = "/dev/shm"
MOST_FILES = 1 << 20  # some programs close every file that they might have open
SPARE_FILES = 64
FULL = "Shared memory is full: enlarge /dev/shm, or lower loader.num_workers or loader.prefetch_factor."
HELD = 2  # batches that the training loop holds

log = logging.getLogger(__name__)


def raise_open_files() -> int | None:
    """Raises the limit of open files of this process, and of what it starts, as far as it may.

    Returns:
        The limit now; none where there is no such limit.
    """
    try:
        import resource
    except ImportError:  # not on this system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a system may have a lower limit of its own
            return soft
        return wanted
    return soft


def hint(error: BaseException) -> str:
    """What to do about an error that says that shared memory is full; nothing about another one."""
    return FULL if isinstance(error, RuntimeError) and "shared memory" in str(error) else ""


class Limits:
    """Compares what the batches of a pool need with what there is.

    Args:
        under_way: Batches that the workers prepare ahead, all together.
        shared_memory: Where shared memory lies.
    """

    def __init__(self, under_way: int, shared_memory: str = SHARED_MEMORY) -> None:
        self._batches = under_way + HELD
        self._shared_memory = shared_memory
        self._files = raise_open_files()
        self._free = _free_bytes(shared_memory)  # before the first batch takes some of it
        self._is_checked = False

    def check(self, batch: Any) -> None:
        """Looks at the first batch that came, and warns where it is more than there is; the others are like it."""
        if self._is_checked:
            return
        self._is_checked = True
        sizes: list[int] = []
        map_tensors(batch, lambda tensor: sizes.append(_shared_bytes(tensor)))
        sizes = [size for size in sizes if size]
        needed = self._batches * sum(sizes)
        if self._free is not None and needed > self._free:
            log.warning(
                "%s had %s free, and up to %d batches of %s are under way: a worker may be ended by SIGBUS. Enlarge it "
                "(docker run --shm-size), or lower loader.num_workers or loader.prefetch_factor.",
                self._shared_memory, _shown(self._free), self._batches, _shown(sum(sizes)),
            )  # fmt: skip
        files = self._batches * len(sizes)
        if self._files is not None and files + SPARE_FILES > self._files:
            log.warning(
                "A process may have %d files open, and up to %d batches of %d tensors, a file each, are under way. Raise "
                "the limit (ulimit -Hn), let collate make fewer tensors, or lower loader.prefetch_factor.",
                self._files, self._batches, len(sizes),
            )  # fmt: skip


def _shared_bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes() if tensor.is_shared() else 0  # type: ignore[no-untyped-call]
    except NotImplementedError:  # a sparse one has none of its own
        return 0


def _free_bytes(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:  # another system: its shared memory has no such limit
        return None
    return status.f_bavail * status.f_frsize


def _shown(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
