"""A process that saves a thousand times holds no more after the last save than after the first ones."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter, deque
from pathlib import Path

import pytest
import torch
from checkpoint_support import make_writer, small_state
from remote_support import make_tier

from framework.checkpoint import CheckpointStore, SaveHeader
from framework.checkpoint.retention import Keep

KEPT = 2


def held(*folders: Path) -> Counter[str]:
    """What this process holds, in numbers that one leaked thing a save changes by one a save."""
    gc.collect()
    counts = Counter(f"objects of {type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    counts["tensors' bytes"] = sum(
        one.nbytes for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.layout is torch.strided
    )
    counts["items of containers"] = sum(len(one) for one in gc.get_objects() if type(one) in (list, dict, set, deque))
    counts["file descriptors"] = len(os.listdir("/proc/self/fd"))
    counts["threads of Python"] = threading.active_count()
    counts["threads"] = len(os.listdir("/proc/self/task"))
    counts["mapped ranges"] = len(Path("/proc/self/maps").read_text().splitlines())
    counts["shared memory"] = sum(f"_{os.getpid()}_" in name for name in os.listdir("/dev/shm"))
    counts["files and folders"] = sum(1 for folder in folders for _ in folder.rglob("*"))
    return counts


def memory() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(tmp_path: Path, windows: int, saves: int) -> tuple[dict[str, int], int]:
    """What grew in each of some windows by one a save or more, and by how many bytes the process grew in all of them.

    What is made once, at whatever time, is in one window only.
    """
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    tier = make_tier(tmp_path / "remote", store)
    writer = make_writer(store, overlap="on", keep=Keep(last=KEPT), remote=tier)
    before: Counter[str] = Counter()
    least: dict[str, int] = {}
    used = []
    for step in range(1, (windows + 1) * saves + 1):
        writer.start(small_state(step), SaveHeader(step, position=8 * step))
        writer.fence(before_update=True)
        (result,) = writer.wait(60)
        assert result.committed, result.error
        if step % saves == 0:
            now = held(tmp_path)  # of earlier counts no more than one is held, as that would be growth too
            least = {name: min(count - before[name], least.get(name, count)) for name, count in now.items()}
            before = now
            used.append(memory())
    assert [found.step for found in store.list()] == [step - number for number in range(KEPT)]
    writer.close()
    return {name: count for name, count in least.items() if count >= saves}, used[-1] - used[0]


def test_nothing_is_held_of_saves_that_are_over(tmp_path: Path) -> None:
    found, _ = grown(tmp_path, windows=3, saves=15)
    assert found == {}


@pytest.mark.soak
def test_a_thousand_saves_leave_memory_flat(tmp_path: Path) -> None:
    found, growth = grown(tmp_path, windows=3, saves=250)
    assert found == {} and growth < 16 << 20
