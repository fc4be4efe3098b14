"""Killed at random moments, without any harness: savers by themselves, and whole trainings that end bitwise equal."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_support import make_writer
from fault_support import KEEP, assert_all_whole, assert_restores, ended, fork, join
from support import assert_same, events, start

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState
from framework.distributed import Group, World

SAVERS = [(6, 1), pytest.param(100, 1, marks=pytest.mark.soak), pytest.param(100, 2, marks=pytest.mark.soak)]
JOB = (
    "+recipe=job",
    "trainer.max_steps=800",
    "callbacks.async_checkpoint.every=3",
    "callbacks.async_checkpoint.keep=2",
)


def draw() -> random.Random:
    seed = int(os.environ.get("CRASH_SEED") or random.SystemRandom().randrange(10**9))
    print(f"CRASH_SEED={seed}")
    return random.Random(seed)


def state(step: int) -> TrainState:
    generator = torch.Generator().manual_seed(step)
    return TrainState({"w": torch.randn(300, 100, generator=generator)}, {"step": step})


def saving_for_ever(world: World, group: Group, path: Path, attempt: int, report: int) -> None:
    """Restores the newest, then saves one step after the other; writes a byte after each."""
    store = CheckpointStore(path)
    newest = assert_restores(path, world, group, state) if attempt > 1 else 0
    if world.is_main:
        store.sweep(attempt)
    writer = make_writer(store, world=world, group=group, attempt=attempt, keep=KEEP)
    writer.prepare(state(0))
    for step in range(newest + 1, newest + 10_000):
        writer.start(state(step), SaveHeader(step))
        assert writer.wait(60)[0].committed
        if world.is_main:
            os.write(report, b".")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kills", "size"), SAVERS)
def test_savers_killed_at_random_moments_leave_whole_checkpoints(kills: int, size: int, tmp_path: Path) -> None:
    chance = draw()
    path = tmp_path / "run" / "checkpoints"
    store = CheckpointStore(path)
    newest = 0
    for attempt in range(1, kills + 1):
        told, report = os.pipe()
        rendezvous = Path(tempfile.mkdtemp(dir=tmp_path)) / "store"

        def run(rank: int, number: int = attempt, place: Path = rendezvous, out: int = report) -> None:
            saving_for_ever(*join(rank, size, place, 20.0), path, number, out)

        pids = [fork(lambda rank=rank: run(rank)) for rank in range(size)]  # type: ignore[misc]
        os.close(report)
        saves = chance.randint(1, 4)
        while saves > 0 and (dots := os.read(told, saves)):
            saves -= len(dots)
        assert saves == 0, "a saver ended by itself"
        time.sleep(chance.uniform(0, 0.05))
        victims = [chance.randrange(size)] if chance.random() < 0.5 else list(range(size))
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        codes = [ended(pid, 60) for pid in pids]  # who is left alone ends by itself
        os.close(told)
        assert all(code == (-signal.SIGKILL if rank in victims else 1) for rank, code in enumerate(codes)), codes
        now = assert_all_whole(store)
        assert now > newest and len(store.list()) <= 3
        newest = now


def newest_of(run: Path) -> int:
    """The newest published step, 0 if there is none."""
    return max((int(file.parent.name[5:]) for file in run.glob("checkpoints/step_*/.metadata")), default=0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_killed_at_50_random_moments_ends_bitwise_equal(
    ranks: int, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    chance = draw()
    run = tmp_path / "runs" / "r"
    words = (*JOB, "run.name=r", "recipe.step_seconds=0.005")
    for _ in range(50):
        before = newest_of(run)
        job = start(*words, cwd=tmp_path, ranks=ranks)
        if chance.random() < 0.8:  # else it is killed while it starts or restores
            job.until(lambda: newest_of(run) > before or not job.is_alive())  # noqa: B023
        time.sleep(chance.uniform(0, 0.15))
        codes = job.kill_all()
        assert set(codes) <= {0, -signal.SIGKILL}, job.output()
        assert_all_whole(CheckpointStore(run / "checkpoints"))
        if codes == [0] * ranks:
            break
    assert len(events(run, "restored")) >= 20
    start(*words, cwd=tmp_path, ranks=ranks).ends(0)
    assert_same(unbroken(*JOB, ranks=ranks), run, ranks)
