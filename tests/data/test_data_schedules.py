"""Any history of a run, with dying loader processes, sees what one unbroken process without workers would see."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from cropped_sets import Cropped
from test_data_loader import fingerprints

from framework.data import DataLoader
from framework.data.position import advance, window_start

Sample = tuple[int, str]
SEED = 11


@dataclass
class Attempt:
    """What one attempt does before it ends: some steps are trained, and some more that no checkpoint has."""

    world: int
    micro: int
    accumulation: int
    workers: list[int]  # of each rank
    steps: int
    lost: int
    kills: dict[int, tuple[int, int]] = field(default_factory=dict)  # before which step; rank and worker
    back: int | None = None  # before which step it goes back to where it began

    @property
    def global_batch(self) -> int:
        return self.world * self.micro * self.accumulation


@dataclass
class Schedule:
    samples: int
    epoch_end: str
    shuffle: bool
    attempts: list[Attempt]


def draw(number: int) -> Schedule:
    """A schedule at random, the same for a number each time."""
    die = random.Random(number)
    schedule = Schedule(die.randint(1, 90), die.choice(["carry", "carry", "drop"]), die.random() < 0.8, [])
    for _ in range(die.randint(2, 4)):
        attempt = Attempt(
            die.randint(1, 4), die.randint(1, 5), die.randint(1, 3), [], die.randint(0, 6), die.randint(0, 2)
        )
        if schedule.epoch_end == "drop" and attempt.global_batch > schedule.samples:
            attempt.world = attempt.micro = attempt.accumulation = 1
        attempt.workers = [die.choice([0, 0, 0, 1, 2]) for _ in range(attempt.world)]
        steps = attempt.steps + attempt.lost
        for step in die.sample(range(steps), min(steps, die.randint(0, 2))):
            rank = die.randrange(attempt.world)
            if attempt.workers[rank]:
                attempt.kills[step] = (rank, die.randrange(attempt.workers[rank]))
        if steps and die.random() < 0.2:
            attempt.back = die.randrange(steps)
        schedule.attempts.append(attempt)
    return schedule


def loader_of(schedule: Schedule, attempt: Attempt, position: int, rank: int) -> DataLoader:
    return DataLoader(
        Cropped(schedule.samples), attempt.micro, schedule.shuffle, seed=SEED, position=position,
        global_batch_size=attempt.global_batch, rank=rank, world_size=attempt.world, epoch_end=schedule.epoch_end,
        num_workers=attempt.workers[rank], worker_restarts=100, endless=True,
    )  # fmt: skip


def run(schedule: Schedule, attempt: Attempt, position: int) -> Iterator[tuple[int, list[Sample]]]:
    """The steps of an attempt: where each begins, and its global batch in the order of the stream."""
    loaders = [loader_of(schedule, attempt, position, rank) for rank in range(attempt.world)]
    running, began = [iter(loader) for loader in loaders], position
    try:
        for step in range(attempt.steps + attempt.lost):
            if step in attempt.kills:
                rank, worker = attempt.kills[step]
                pool = loaders[rank]._pool
                assert pool is not None
                os.kill(pool.pids[worker], signal.SIGKILL)
            if step == attempt.back:
                position = began
                for loader in loaders:
                    loader.seek(position)
            shares = [
                [each for _ in range(attempt.accumulation) for each in fingerprints(next(one))] for one in running
            ]
            for loader in loaders:
                loader.commit(attempt.accumulation)
            yield position, list(itertools.chain(*zip(*shares, strict=True)))
            position = advance(position, attempt.global_batch, schedule.samples, schedule.epoch_end)
    finally:
        for loader in loaders:
            loader.close()


def reference(schedule: Schedule, positions: int) -> list[Sample]:
    """The stream, from one process without workers."""
    alone = Attempt(1, schedule.samples, 1, [0], positions // schedule.samples + 1, 0)
    whole = Schedule(schedule.samples, "carry", schedule.shuffle, [alone])
    return [sample for _, batch in run(whole, alone, 0) for sample in batch]


def check(number: int) -> None:
    schedule, position, seen = draw(number), 0, Counter[tuple[int, int]]()
    taken: list[tuple[int, list[Sample]]] = []
    for attempt in schedule.attempts:
        steps = list(run(schedule, attempt, position))
        taken += steps
        done = attempt.steps if attempt.back is None else max(0, attempt.steps - attempt.back)
        committed = dict(steps[: attempt.steps][-done:] if done else [])  # what came before it went back is undone
        for start, batch in committed.items():
            at = window_start(start, attempt.global_batch, schedule.samples, schedule.epoch_end)
            seen.update(((at + offset) // schedule.samples, sample[0]) for offset, sample in enumerate(batch))
            position = advance(start, attempt.global_batch, schedule.samples, schedule.epoch_end)
    stream = reference(schedule, max((start + 2 * len(batch) + schedule.samples for start, batch in taken), default=0))
    for start, batch in taken:
        at = window_start(start, len(batch), schedule.samples, schedule.epoch_end)
        assert batch == stream[at : at + len(batch)], f"schedule {number}, position {start}: {schedule}"
    assert set(seen.values()) <= {1}, f"schedule {number}: {schedule}"
    if schedule.epoch_end == "carry":
        whole = {(at // schedule.samples, stream[at][0]) for at in range(position)}
        assert set(seen) == whole and len(whole) == position, f"schedule {number}: {schedule}"


@pytest.mark.parametrize(
    "numbers",
    [range(30), pytest.param(range(30, 1030), marks=[pytest.mark.soak, pytest.mark.timeout(7200)])],
    ids=["30", "1000"],
)
def test_every_history_sees_the_same_global_batches_bit_by_bit_and_each_sample_once(numbers: range) -> None:
    for number in numbers:
        check(number)


def test_the_histories_hold_what_they_should() -> None:
    """Enough of everything among those of the quick test."""
    drawn = [draw(number) for number in range(30)]
    attempts = [attempt for schedule in drawn for attempt in schedule.attempts]
    assert sum(len(attempt.kills) for attempt in attempts) >= 15
    assert sum(attempt.back is not None for attempt in attempts) >= 8
    assert {attempt.world for attempt in attempts} == {1, 2, 3, 4}
    assert {schedule.epoch_end for schedule in drawn} == {"carry", "drop"}
    assert sum(schedule.samples < attempt.global_batch for schedule in drawn for attempt in schedule.attempts) >= 5
