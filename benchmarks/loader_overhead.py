"""What the loader costs the training thread, beside torch's own loader in the same run.

    python benchmarks/loader_overhead.py

0 workers, a list of tensors as dataset, samples handed on without collating: what remains is the loader itself. CPU
time of the main thread, smallest of several rounds; the two loaders take turns. The cost of a batch of `n` samples is
`per batch + n · per sample`, solved from small and large batches. Targets: 15 µs a sample, 200 µs a batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from framework.data.loader import DataLoader

SMALL, LARGE = 1, 256  # samples of a batch
BATCHES = {SMALL: 2000, LARGE: 60}
ROUNDS = 7
TARGETS = {"per sample": 15.0, "per batch": 200.0}  # µs


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """As cheap as a dataset can be."""

    def __init__(self, samples: int) -> None:
        self.rows = list(torch.arange(min(samples, 1000)))
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % 1000]


def as_is(samples: list[Any]) -> list[Any]:
    """Collates nothing."""
    return samples


def ours(dataset: Numbers, batch_size: int) -> Iterator[Any]:
    return iter(DataLoader(dataset, batch_size, num_workers=0, endless=True, collate_fn=as_is))


def torchs(dataset: Numbers, batch_size: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, collate_fn=as_is)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def seconds_per_batch(batches: Iterator[Any], count: int) -> float:
    """CPU seconds of this thread for one batch."""
    began = time.thread_time()
    for _ in itertools.islice(batches, count):
        pass
    return (time.thread_time() - began) / count


def measure(samples: int) -> dict[str, dict[str, float]]:
    """µs per sample and per batch of both loaders."""
    dataset = Numbers(samples)
    loaders: dict[str, Callable[[Numbers, int], Iterator[Any]]] = {"ours": ours, "torch": torchs}
    running = {(name, size): make(dataset, size) for name, make in loaders.items() for size in BATCHES}
    for batches in running.values():
        next(batches)  # torch's shuffles the whole epoch here
    best = dict.fromkeys(running, float("inf"))
    for _ in range(ROUNDS):
        for (name, size), batches in running.items():
            best[name, size] = min(best[name, size], seconds_per_batch(batches, BATCHES[size]))
    costs = {}
    for name in loaders:
        per_sample = (best[name, LARGE] - best[name, SMALL]) / (LARGE - SMALL)
        costs[name] = {"per sample": per_sample * 1e6, "per batch": (best[name, SMALL] - SMALL * per_sample) * 1e6}
    return costs


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'samples':>10}  {'µs':<10} {'ours':>8} {'torch':>8} {'ratio':>7} {'target':>8}")
    for samples in (50_000, 5_000_000):  # sorted by hash, and permuted by the Feistel network
        costs = measure(samples)
        for what, target in TARGETS.items():
            mine, theirs = costs["ours"][what], costs["torch"][what]
            verdict = "met" if mine <= target else "MISSED"
            print(f"{samples:>10}  {what:<10} {mine:8.2f} {theirs:8.2f} {mine / theirs:7.1f} {target:8.0f}  {verdict}")


if __name__ == "__main__":
    main()
