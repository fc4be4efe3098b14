"""What the journal and the clock of a run cost a step, beside the same steps without them.

    python benchmarks/journal_overhead.py [--steps 20000] [--rounds 7] [--json FILE]

A step is what the trainer does for its record: three laps of the meter, a loss, a learning rate and a metric, and the
end of the step, with a batch of 100 steps written as one line. Each way does the same calls; `without` has a meter that
measures nothing and a log that writes nothing. They take turns. Given is the time of the main thread, in µs a step, less
that of `without` in the same round, the median of the rounds; writing to the disk is in it. Behind it the time of all
threads, the one that keeps the account for the progress line included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from framework.goodput.accounts.running import RunningAccount
from framework.journal import Journal
from framework.loop.meter import CHECKPOINT, DATA_WAIT, PRODUCTIVE, LapMeter, Meter
from framework.loop.steplog import StepLog
from framework.stepmark import StepMark

TARGET = 2.0  # µs
Parts = tuple[StepLog, Meter, Callable[[], object]]  # the last one waits for the account


@contextmanager
def without(folder: Path) -> Iterator[Parts]:
    yield StepLog(None, StepMark(None)), Meter(), bool


@contextmanager
def clocks(folder: Path) -> Iterator[Parts]:
    yield StepLog(None, StepMark(None)), LapMeter(), bool


@contextmanager
def journal(folder: Path) -> Iterator[Parts]:
    written = Journal(folder / "att-0001" / "rank0.jsonl", 1)
    yield StepLog(written, StepMark(folder / "att-0001" / "rank0.step")), LapMeter(), bool
    written.close()


@contextmanager
def account(folder: Path) -> Iterator[Parts]:
    written = Journal(folder / "att-0001" / "rank0.jsonl", 1)
    kept = RunningAccount(folder, 1)
    written.listeners.append(kept.add)
    yield StepLog(written, StepMark(folder / "att-0001" / "rank0.step")), LapMeter(), lambda: kept.total(60.0)
    kept.close()
    written.close()


WAYS: dict[str, Callable[[Path], object]] = {
    "without": without, "the clocks": clocks, "and the journal, a mark a step": journal, "and the live account": account,
}  # fmt: skip


def measure(way: Callable[[Path], object], steps: int) -> tuple[float, float]:
    """µs a step: of the main thread, of the process."""
    with tempfile.TemporaryDirectory(prefix="journal-") as folder, way(Path(folder)) as (log, meter, settle):  # type: ignore[attr-defined]
        loss, metrics = torch.tensor(0.5), {"top1": torch.tensor(0.25)}
        meter.begin()
        log.begin(0)
        main, process = time.thread_time_ns(), time.process_time_ns()
        for _ in range(steps):
            meter.lap(DATA_WAIT)
            log.add(loss, 0.1, metrics)
            meter.lap(PRODUCTIVE)
            meter.lap(CHECKPOINT)
            log.end_step(meter)
        log.flush(meter)
        main = time.thread_time_ns() - main
        settle()
    return main / steps / 1e3, (time.process_time_ns() - process) / steps / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which all ways take turns")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name, way in WAYS.items():
            found[name].append(measure(way, arguments.steps))
    print(f"{'':32}{'main thread':>14}{'all threads':>14}")
    for name, times in found.items():
        more = [
            [one[place] - bare[place] for one, bare in zip(times, found["without"], strict=True)] for place in (0, 1)
        ]
        print(f"{name:32}{statistics.median(more[0]):11.2f} µs{statistics.median(more[1]):11.2f} µs")
    print(f"target: less than {TARGET:g} µs a step for the journal, beside the clocks")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
