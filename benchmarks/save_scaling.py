"""How the time of a save falls with the number of ranks where each has its own way to the store.

    python benchmarks/save_scaling.py [--megabytes 128] [--rate 16] [--saves 3] [--json FILE]

A state that all ranks hold is saved by 1, 2 and 4 processes of this host to a folder, through a way that takes so many
MB/s of each process and no more: with one rank the transfer alone takes 8 s. Given are the seconds from the end of the
stall to the commit in both places (median of the saves), their ratio to those of one rank, and the bytes that the
busiest rank sent. Best would be 1, 0.5 and 0.25.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework.checkpoint import CheckpointStore, CheckpointWriter, SaveHeader, TrainState
from framework.checkpoint.remote import RemoteTier
from framework.checkpoint.retention import Keep
from framework.distributed import Group, World
from framework.volume.local import LocalVolume

RANKS = (1, 2, 4)
PATIENCE_SECONDS = 600.0
LAYERS = 16  # with an embedding that is half of all


class NarrowVolume(LocalVolume):
    """A folder that takes so many bytes per second of this process."""

    def __init__(self, path: Path, rate: float) -> None:
        super().__init__(path)
        self.rate = rate
        self.sent = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def upload(self, name: str, parts: Iterable[memoryview | bytes], size: int) -> None:
        super().upload(name, self._paced(parts), size)

    def _paced(self, parts: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
        for part in parts:
            with self._lock:
                self.sent += len(part)
                self._free = max(self._free, time.monotonic()) + len(part) / self.rate
                wait = self._free - time.monotonic()
            time.sleep(max(0.0, wait))
            yield part


def main() -> None:
    arguments = parse()
    rows = []
    print(f"{arguments.megabytes} MB held by all ranks, {arguments.rate:g} MB/s a rank, load {os.getloadavg()[0]:.1f}")
    print(f"{'ranks':>5}  {'seconds':>7}  {'ratio':>5}  {'MB of the busiest rank':>22}")
    for ranks in RANKS:
        seconds, sent = measure(ranks, arguments)
        rows.append({"ranks": ranks, "seconds": seconds, "sent": sent})
        print(f"{ranks:>5}  {seconds:>7.2f}  {seconds / rows[0]['seconds']:>5.2f}  {sent / 1e6:>22.1f}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"megabytes": arguments.megabytes, "rate": arguments.rate, "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How the time of a save falls with the number of ranks.")
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--rate", type=float, default=16.0, help="MB/s of each rank's way to the store")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(ranks: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a save, and the bytes that the busiest rank sent for each."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="save-scaling-") as folder:
        ends, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=one_rank, args=(rank, ranks, folder, arguments, theirs)))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        try:
            answers: list[tuple[float, float]] = []
            for rank, end in enumerate(ends):
                if not end.poll(PATIENCE_SECONDS):
                    raise SystemExit(f"rank {rank} gave no answer within {PATIENCE_SECONDS:g} s")
                answers.append(end.recv())
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return max(seconds for seconds, _ in answers), max(sent for _, sent in answers)


def one_rank(rank: int, ranks: int, folder: str, arguments: argparse.Namespace, answer: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    patience = datetime.timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    world = World(rank, ranks, rank, ranks, torch.device("cpu"))
    group = Group(world, timeout_seconds=PATIENCE_SECONDS, name="checkpoint")
    place = NarrowVolume(Path(folder) / "remote", arguments.rate * 1e6)
    local = CheckpointStore(Path(folder) / "run" / "checkpoints")
    options: dict[str, Any] = {"run": "bench", "attempt": 1, "token": "bench"}
    tier = RemoteTier(place, group, store=local, **options)
    tier.claim()
    writer = CheckpointWriter(
        local, world, group, is_owner=lambda: True, timeout_seconds=PATIENCE_SECONDS, keep=Keep(last=1), remote=tier,
        **options,
    )  # fmt: skip
    state = make(arguments.megabytes * 1_000_000)
    writer.prepare(state)
    seconds = []
    for step in range(1, arguments.saves + 1):
        writer.start(state, SaveHeader(step))
        (result,) = writer.wait(PATIENCE_SECONDS)
        if not result.committed:
            raise SystemExit(result.error)
        seconds.append(result.persist_seconds)
    writer.close()
    answer.send((statistics.median(seconds), place.sent / arguments.saves))
    dist.destroy_process_group()


def make(size: int) -> TrainState:
    """A model of so many bytes, the same on every rank; one tensor is half of it."""
    rows = size // 8 // 1000
    layers = {f"layer{number}": torch.zeros(rows // LAYERS, 1000) for number in range(LAYERS)}
    return TrainState({"model": {"embedding": torch.zeros(rows, 1000), **layers}})


if __name__ == "__main__":
    main()
