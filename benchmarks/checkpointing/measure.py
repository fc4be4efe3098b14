"""Saves beside a training loop, and what that costs the loop."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpointing.contenders import Contender, State
from checkpointing.states import leaves

WARM_STEPS = 10
PYTHON_WORK = 4_000  # additions that hold the interpreter lock in each step
MATRIX = 512


@dataclass(frozen=True)
class Figures:
    """What one contender cost. Times in seconds.

    Args:
        memcpy: One copy of the state into memory that is there, the best of several.
        first: The loop blocked by the first save.
        blocked: The same for each later one, the median.
        worst_step: The longest step beside a save less the longest of as many without one, the median of all saves.
        lost: Training time lost while the save was written, as a share of the time to write.
        committed: From the call until the save was durable, the median.
        disk: `committed` as a multiple of one plain sequential write of as many bytes, with fsync, right before the
            save in the same process; the median of the saves.
    """

    memcpy: float
    first: float
    blocked: float
    worst_step: float
    lost: float
    committed: float
    disk: float


class Loop:
    """Steps of matrix products, which release the interpreter lock, and work that holds it.

    Args:
        contender: Whose fence is called where the update would come.
        seconds: About how long a step takes; a step of a model is longer than a copy of its state.
    """

    def __init__(self, contender: Contender, seconds: float) -> None:
        self._contender = contender
        self._rounds = 1
        self._left, self._right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
        self.step()
        self._rounds = max(1, round(seconds / min(self.step()[0] for _ in range(5))))

    def step(self) -> tuple[float, float]:
        """One step; returns its length and how long its fence was, in seconds."""
        began = time.perf_counter()
        for _ in range(self._rounds):
            total = 0
            for number in range(PYTHON_WORK):
                total += number
            torch.mm(self._left, self._right)
        before = time.perf_counter()
        self._contender.fence()
        fenced = time.perf_counter() - before
        return time.perf_counter() - began - fenced, fenced


def run(contender: Contender, state: State, saves: int) -> Figures:
    """Saves `saves` times beside a loop."""
    memcpy = copy_seconds(state)
    loop = Loop(contender, 2 * memcpy)
    contender.prepare(state)
    loop.step()
    blocked, worst, lost, committed, disk = [], [], [], [], []
    size = sum(tensor.nbytes for _, tensor in leaves(state))
    for number in range(1, saves + 1):
        usual = [loop.step()[0] for _ in range(WARM_STEPS)]
        plain = disk_seconds(contender.folder, size)
        contender.durable_at = None
        began = time.perf_counter()
        contender.save(state, number)
        stall = time.perf_counter() - began
        steps = []
        first, fenced = loop.step()
        steps.append(first)
        written = time.perf_counter()
        while not contender.is_done():
            steps.append(loop.step()[0])
        contender.wait()
        end = time.perf_counter()
        blocked.append(stall + fenced)
        # whoever does not say when is asked after each step, which is too late by half a step on average
        committed.append((contender.durable_at or end) - began)
        disk.append(committed[-1] / plain)
        if len(steps) > 3:
            # as many steps without a save: the longest of many is longer than the longest of few
            alone = [loop.step()[0] for _ in range(min(len(steps), 400))]
            usual_step = statistics.median([*usual, *alone])
            worst.append(max(steps[: len(alone)]) - max(alone))
            lost.append(max(0.0, (sum(steps) - len(steps) * usual_step) / max(end - written, 1e-9)))
    return Figures(
        memcpy,
        blocked[0],
        statistics.median(blocked[1:]),
        statistics.median(worst) if worst else float("nan"),
        statistics.median(lost) if lost else float("nan"),
        statistics.median(committed[1:]),
        statistics.median(disk[1:]),
    )


def copy_seconds(state: State) -> float:
    """One copy of all tensors into memory that was touched before, the best of five."""
    sources = [tensor for _, tensor in leaves(state)]
    flat = torch.cat([tensor.reshape(-1) for tensor in sources])
    target = torch.zeros_like(flat)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(flat)
        times.append(time.perf_counter() - began)
    return min(times)


def disk_seconds(folder: Path, size: int) -> float:
    """A sequential write with fsync, beside nothing."""
    piece = memoryview(os.urandom(8 << 20))
    path = folder / "plain"
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
    for at in range(0, size, len(piece)):
        os.write(fd, piece[: size - at])
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def restore(folder: Path, state: State, step: int) -> dict[str, float]:
    """Seconds to load one of our checkpoints, from a warm page cache: by stock dcp.load, by ours, by ours verified."""
    import torch.distributed.checkpoint as dcp

    from framework.checkpoint import CheckpointReader, CheckpointStore
    from framework.distributed import Group, World

    world = World(0, 1, 0, 1, torch.device("cpu"))
    store = CheckpointStore(folder / "checkpoints")
    path = store.folder(step)
    blank: dict[str, Any] = {key: torch.zeros_like(value) for key, value in leaves(state)}
    times: dict[str, list[float]] = {"dcp.load": [], "ours": [], "ours, verified": []}
    for _ in range(4):
        began = time.perf_counter()
        dcp.load(blank, checkpoint_id=str(path))
        times["dcp.load"].append(time.perf_counter() - began)
        reader = CheckpointReader(store, world, Group(world, timeout_seconds=60, name="restore"))
        began = time.perf_counter()
        found = reader.open(store.look(path))
        opened = time.perf_counter()
        reader.load(found, blank)
        end = time.perf_counter()
        times["ours"].append(end - opened)
        times["ours, verified"].append(end - began)
    return {name: min(found) for name, found in times.items()}
