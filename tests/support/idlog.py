"""Reads the id log that `job_callbacks.IdLog` writes: what every step of every attempt consumed.

Guarantee: of a step that was replayed after a restart only the last attempt is in the kept history, as in the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Consumed:
    """One step of one rank.

    Args:
        attempt: Number of the attempt, from 1.
        epoch: Epoch of the first sample.
        step: Number of the step, from 1.
        rank: Which rank.
        ids: Sample ids in the order of the micro-batches.
        loss: Global loss, as `float.hex`.
        lr: Learning rate of the update, as `float.hex`.
    """

    attempt: int
    epoch: int
    step: int
    rank: int
    ids: tuple[int, ...]
    loss: str
    lr: str


def every_step(run: Path, rank: int = 0) -> list[Consumed]:
    """All lines of one rank, in the order in which they were written, replayed steps included."""
    lines = (run / "ids" / f"rank{rank}.jsonl").read_text().splitlines()
    return [Consumed(**{**entry, "ids": tuple(entry["ids"])}) for entry in map(json.loads, lines)]


def kept(run: Path, rank: int = 0) -> dict[int, Consumed]:
    """The kept history of one rank by step."""
    return {line.step: line for line in every_step(run, rank)}


def global_batches(run: Path, ranks: int = 1) -> dict[int, list[int]]:
    """The sorted ids of the global batch of each step in the kept history."""
    histories = [kept(run, rank) for rank in range(ranks)]
    return {step: sorted(i for one in histories for i in one[step].ids) for step in histories[0]}
