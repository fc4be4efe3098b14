"""How long it takes from the start of a loader in mid-epoch to its first batch.

    python benchmarks/resume_position.py [--rounds 5] [--json FILE]

The dataset costs nothing to read, so that only finding the place is measured; batches of 256, no worker processes. Each
way runs in a process of its own, which gives its peak memory; given is the median of the rounds, and the ratio to ours
of the same length. Ways whose time grows with the length are left out where one start would take minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset

from framework.data import DataLoader

BATCH = 256
LENGTHS = (10**6, 10**8, 10**10)
LONGEST = 10**6  # for what grows with the length


class Free(Dataset[int]):
    """Samples that are their own index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def ours(length: int) -> Iterator[Any]:
    """Seeks the position, which is one integer."""
    loader = DataLoader(Free(length), BATCH, num_workers=0, position=length // 2, endless=True)
    return iter(loader)


def stateful(length: int) -> Iterator[Any]:
    """torchdata's StatefulDataLoader, from the state it gave in mid-epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    state = _states.get(length)
    if state is None:  # made once, not measured
        loader = StatefulDataLoader(Free(length), BATCH, shuffle=True)
        iterator = iter(loader)
        for _ in range(length // 2 // BATCH):
            next(iterator)
        state = _states[length] = loader.state_dict()
    loader = StatefulDataLoader(Free(length), BATCH, shuffle=True)
    loader.load_state_dict(state)
    _restart_clock()
    return iter(loader)


def accelerate(length: int) -> Iterator[Any]:
    """Accelerate's skip_first_batches."""
    from accelerate import skip_first_batches

    loader = StockLoader(Free(length), BATCH, shuffle=True)
    return iter(skip_first_batches(loader, length // 2 // BATCH))


def going_on(length: int) -> Iterator[Any]:
    """A `continue` over all batches that were trained already."""
    for number, batch in enumerate(StockLoader(Free(length), BATCH, shuffle=True)):
        if number < length // 2 // BATCH:
            continue
        yield batch


WAYS: dict[str, Callable[[int], Iterator[Any]]] = {
    "ours": ours,
    "StatefulDataLoader": stateful,
    "skip_first_batches": accelerate,
    "continue": going_on,
}
_states: dict[int, Any] = {}
_clock = 0.0


def _restart_clock() -> None:
    global _clock
    _clock = time.perf_counter()


def measure(way: str, length: int, rounds: int, answer: Any) -> None:
    """Sends the median seconds, and how many MB the peak of memory grew by."""
    torch.set_num_threads(1)
    try:
        next(WAYS[way](4 * BATCH))  # imports
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = []
        for _ in range(rounds):
            _restart_clock()
            next(WAYS[way](length))
            seconds.append(time.perf_counter() - _clock)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        answer.send((statistics.median(seconds), grown / 1024))
    except ImportError as error:
        answer.send(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    print(f"{'way':<22}{'samples':>16}{'first batch':>14}{'/ ours':>10}{'memory':>12}")
    for length in LENGTHS:
        base = None
        for way in WAYS:
            if way != "ours" and length > LONGEST:
                print(f"{way:<22}{length:>16,}{'left out: grows with the length':>36}")
                continue
            ours_end, theirs = context.Pipe()
            process = context.Process(target=measure, args=(way, length, arguments.rounds, theirs))
            process.start()
            theirs.close()
            try:
                told = ours_end.recv() if ours_end.poll(600) else "longer than 600 s"
            except EOFError:
                told = "it failed"
            process.kill()
            process.join()
            if isinstance(told, str):
                print(f"{way:<22}{length:>16,}  not measured: {told}")
                continue
            seconds, grown = told
            base = seconds if way == "ours" else base
            ratio = seconds / base if base else float("nan")
            rows.append({"way": way, "samples": length, "seconds": seconds, "ratio": ratio, "memory_mb": grown})
            print(f"{way:<22}{length:>16,}{seconds * 1000:>11.2f} ms{ratio:>10.1f}{grown:>9.1f} MB")
    if arguments.json:
        with open(arguments.json, "w") as stream:
            json.dump(rows, stream, indent=1)


if __name__ == "__main__":
    main()
