"""How much a job slows down the more often it saves.

    python benchmarks/checkpoint_frequency.py [--steps 400] [--rounds 5] [--json FILE]

One job trains a model whose state (weights and Adam's moments) is about 100 MB, in one thread, with saves never, every
100, every 10 steps and after each step. The four take turns in one process, a round each, so that the machine's moods
meet all of them; given is the time per step, the rate against that of the job without saves (median of the rounds,
and their range), and how many saves were left out because the one before was still being written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from framework.checkpoint import CheckpointStore, CheckpointWriter, SaveHeader, TrainState
from framework.checkpoint.retention import Keep
from framework.distributed import Group, World

WIDTH, LAYERS, BATCH = 1024, 8, 16  # 8.4 million parameters
INTERVALS = (0, 100, 10, 1)


class Job:
    """A model, its optimizer and a writer of its own."""

    def __init__(self, folder: Path, every: int) -> None:
        torch.manual_seed(0)
        self.every = every
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(BATCH, WIDTH)
        world = World(0, 1, 0, 1, torch.device("cpu"))
        group = Group(world, timeout_seconds=600, name="checkpoint")
        self.writer = CheckpointWriter(
            CheckpointStore(folder / f"every{every}"), world, group, run="bench", attempt=1, token="bench",
            is_owner=lambda: True, timeout_seconds=600, keep=Keep(last=2),
        )  # fmt: skip
        self.steps = self.saved = self.skipped = 0
        self.advance()
        if every:
            self.writer.prepare(self.state())
        self.advance()

    def advance(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.writer.fence(before_update=True)
        self.optimizer.step()
        self.steps += 1

    def state(self) -> TrainState:
        parameters = dict(self.model.named_parameters())
        moments = {name: dict(self.optimizer.state[parameter]) for name, parameter in parameters.items()}
        settled = {f"model.{name}" for name in parameters}
        settled |= {f"moments.{name}.{item}" for name, items in moments.items() for item in items}
        return TrainState({"model": parameters, "moments": moments}, settled=frozenset(settled))

    def round(self, steps: int) -> float:
        """Seconds per step; the last save's write is waited for outside of it."""
        began = time.perf_counter()
        for _ in range(steps):
            self.advance()
            for result in self.writer.poll():
                assert result.committed, result.error
            if self.every and self.steps % self.every == 0:
                if self.writer.busy:
                    self.skipped += 1
                else:
                    self.saved += 1
                    self.writer.start(self.state(), SaveHeader(step=self.steps))
        seconds = (time.perf_counter() - began) / steps
        self.writer.wait(600)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="frequency-"))
    try:
        jobs = [Job(folder, every) for every in INTERVALS]
        times: dict[int, list[float]] = {every: [] for every in INTERVALS}
        for number in range(arguments.rounds):
            turn = jobs[number % len(jobs) :] + jobs[: number % len(jobs)]
            for job in turn:
                times[job.every].append(job.round(arguments.steps))
        rows = [row(job, times) for job in jobs]
        for job in jobs:
            job.writer.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'save every':>12}{'ms per step':>13}{'rate':>8}{'range':>14}{'saves':>8}{'left out':>10}")
    for one in rows:
        span = f"{one['lowest']:.2f}-{one['highest']:.2f}"
        print(
            f"{one['every'] or 'never':>12}{one['seconds'] * 1e3:13.1f}{one['rate']:8.3f}{span:>14}"
            f"{one['saves']:8}{one['skipped']:10}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def row(job: Job, times: dict[int, list[float]]) -> dict[str, Any]:
    mine = times[job.every]
    rates = [never / one for never, one in zip(times[0], mine, strict=True)]
    return {
        "every": job.every, "seconds": statistics.median(mine), "rate": statistics.median(rates),
        "lowest": min(rates), "highest": max(rates), "saves": job.saved, "skipped": job.skipped,
    }  # fmt: skip


if __name__ == "__main__":
    main()
