"""A run of two ranks that fails in many ways and is started again after each of them, as a scheduler does."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import Run, kill_at, start

from framework.checkpoint import CheckpointStore
from framework.data.audit.log import STEP, log_path, read_log
from framework.rundir import RunDirectory
from framework.stepmark import read_mark

RANKS = 2
EVERY = 5  # steps between saves
STEP_SECONDS = 0.03
SPACING = 14  # steps between failures: more than between saves, so that the run gets on


@dataclass(frozen=True, slots=True)
class Failure:
    """One way to fail.

    Args:
        name: Which, for words.
        ended: What the report may call the end of the attempt.
        words: What the command line says of it, for the step at which it is due and a name that is its own.
        act: What is done to the run once that step is done; none if it fails by itself.
        says: What the report's message has in it, if the rank that keeps the journal lives to say it.
    """

    name: str
    ended: tuple[str, ...]
    words: Callable[[int, str], str] | None = None
    act: Callable[[Run, Path], None] | None = None
    says: str = ""


def _trip(kind: str, rank: int) -> Callable[[int, str], str]:
    return lambda step, name: (
        f"+callbacks.{name}={{_target_: job_faults.Trip, step: {step}, kind: {kind}, rank: {rank}}}"
    )


def _kill_at(phase: str, rank: int) -> Callable[[int, str], str]:
    return lambda step, name: kill_at(step, phase, rank=rank, name=name)


def _signal(number: int, *ranks: int) -> Callable[[Run, Path], None]:
    def send(run: Run, _: Path) -> None:
        for rank in ranks:
            run.kill(rank, number)

    return send


def _damage(run: Run, path: Path) -> None:
    run.kill_all()
    newest = CheckpointStore(path / "checkpoints").newest()
    assert newest is not None
    shard = max(newest.path.glob("*.distcp"), key=os.path.getsize)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


GONE = ("killed",)
ORDERLY = ("killed",)  # by a signal: the journal says so, and that the state was saved
FAILED = ("failed",)
EITHER = ("failed", "killed")  # whether the rank that keeps the journal still comes to say it
FAILURES = (
    Failure("SIGKILL of rank 0", GONE, act=_signal(signal.SIGKILL, 0)),
    Failure("SIGKILL of rank 1", EITHER, act=_signal(signal.SIGKILL, 1)),
    Failure("SIGKILL of all ranks", GONE, act=_signal(signal.SIGKILL, 0, 1)),
    Failure("rank 1 frozen", ("failed",), act=_signal(signal.SIGSTOP, 1), says="rank 1 did not come"),
    Failure("error in rank 0", FAILED, _trip("error", 0), says="a step went wrong"),
    Failure("error in rank 1", EITHER, _trip("error", 1)),
    Failure("broken sample", EITHER, _trip("sample", 1)),
    Failure("out of memory", FAILED, _trip("memory", 0), says="no memory is left"),
    Failure("os._exit", GONE, _trip("exit", 0)),
    Failure("SIGSEGV", EITHER, _trip("segv", 1)),
    Failure("SIGABRT", GONE, _trip("abort", 0)),
    Failure("NaN in a gradient", FAILED, _trip("gradient", 0)),
    Failure("SIGTERM", ORDERLY, act=_signal(signal.SIGTERM, 0, 1)),
    Failure("SIGUSR1", ORDERLY, act=_signal(signal.SIGUSR1, 0, 1)),
    Failure("SIGINT", ORDERLY, act=_signal(signal.SIGINT, 0, 1)),
    Failure("kill in a write", EITHER, _kill_at("writing", 1)),
    Failure("kill before a commit", GONE, _kill_at("commit", 0)),
    Failure("kill after a commit", GONE, _kill_at("committed", 0)),
    Failure("damaged checkpoint", GONE, act=_damage),
)


def drill(folder: Path, failures: Sequence[Failure], seed: int) -> tuple[Path, list[Failure]]:
    """Runs until all have come, in an order and at steps that `seed` draws, and then to the end.

    Returns:
        The run directory, and the failures in their order.
    """
    chance = random.Random(seed)
    order = list(failures)
    chance.shuffle(order)
    due = [SPACING * number + chance.randrange(EVERY) for number in range(1, len(order) + 1)]
    steps = due[-1] + SPACING
    words = [
        "+recipe=toy", "run.name=r", "callbacks.mlflow=null", "callbacks.progress=null", "trainer.max_epochs=null",
        f"trainer.max_steps={steps}", "trainer.eval_every=null", f"recipe.step_seconds={STEP_SECONDS}",
        f"callbacks.async_checkpoint.every={EVERY}", "callbacks.data_position.audit=true", "trainer.timeout=6s",
        "callbacks.async_checkpoint.timeout=6s",
    ]  # fmt: skip
    for number, (failure, step) in enumerate(zip(order, due, strict=True)):
        if failure.words is not None:
            words.append(failure.words(step, f"f{number}"))
    path = folder / "runs" / "r"
    for attempt, (failure, step) in enumerate(zip(order, due, strict=True), 1):
        run = start(*words, cwd=folder, ranks=RANKS)
        if failure.act is not None:
            mark = RunDirectory(path).mark_file(attempt)
            run.until(lambda mark=mark, step=step: getattr(read_mark(mark), "step", 0) >= step)  # type: ignore[misc]
            failure.act(run, path)
        _all_ended(run, failure)
    start(*words, cwd=folder, ranks=RANKS).ends(0)
    return path, order


def _all_ended(run: Run, failure: Failure) -> None:
    """As a launcher does: once one rank has ended in another way than by a save, the others get a while, then a kill."""
    deadline = time.monotonic() + 60
    while not run.codes:
        assert time.monotonic() < deadline, f"{failure.name}: nobody has ended\n{run.output()}"
        run.wait_any(1.0)
    assert 0 not in run.codes.values(), f"{failure.name}: it ended as if nothing had been\n{run.output()}"
    deadline = time.monotonic() + 10
    while len(run.codes) < RANKS and time.monotonic() < deadline:
        run.wait_any(0.2)
    run.kill_all()


def steps_redone(path: Path) -> dict[int, int]:
    """By attempt how many steps of rank 0 were done again later, counted from the log of the samples alone."""
    trained: dict[int, list[int]] = {}
    number = 1
    while log_path(path / "events", number, 0).parent.exists():
        log = log_path(path / "events", number, 0)
        trained[number] = [record.step for kind, record in read_log(log) if kind == STEP] if log.exists() else []
        number += 1
    counted: dict[int, int] = {}
    later: set[int] = set()
    for attempt in sorted(trained, reverse=True):
        counted[attempt] = sum(step in later for step in trained[attempt])
        later |= set(trained[attempt])
    return counted
