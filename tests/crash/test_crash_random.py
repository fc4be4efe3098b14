"""Killed five times at random, a run ends with the bits of the unbroken one. A seed is printed: CRASH_SEED=… repeats it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same, compare, endure, events, kill_at, slow_save, start

COMPUTE = ["fetch", "forward", "backward", "before_update", "after_update", "step_end"]
COMMIT = ["writing", "sealing", "commit", "committed"]
JOB = ("+recipe=job", "trainer.max_steps=60", "callbacks.async_checkpoint.every=3", "loader.num_workers=1")
# digits, small enough for the tests: 16 x 16 pixels, batches of 8 in two micro-batches
IMAGES = (
    "+recipe=imagenet_resnet", "~callbacks.mlflow", "data.train.size=16", "data.eval.resize=16",
    "trainer.max_epochs=null", "trainer.max_steps=20", "schedule.warmup=4", "trainer.global_batch_size=8",
    "trainer.micro_batch_size=4", "trainer.eval_every=null", "trainer.eval_at_end=false", "loader.num_workers=1",
    "callbacks.async_checkpoint.every=2",
)  # fmt: skip
FULL_SECONDS = 1200.0  # of one attempt: a processor without bf16 takes seconds for a step


def _random() -> random.Random:
    seed = int(os.environ.get("CRASH_SEED") or random.SystemRandom().randrange(10**9))
    print(f"CRASH_SEED={seed}")
    return random.Random(seed)


def _kills(draw: random.Random, first: int, last: int) -> list[str]:
    """Five kills: compute, staging and commit are among them, in a random order, at random steps."""
    kinds = [COMPUTE, ["staging"], COMMIT, draw.choice([COMPUTE, COMMIT]), draw.choice([COMPUTE, COMMIT, ["staging"]])]
    draw.shuffle(kinds)
    steps = sorted(draw.sample(range(first, last), len(kinds)))
    kills = [
        kill_at(step, draw.choice(kind), name=f"k{n}") for n, (step, kind) in enumerate(zip(steps, kinds, strict=True))
    ]
    print("\n".join(kills))
    return kills


def test_five_kills_at_random_places(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    draw = _random()
    run = tmp_path / "runs" / "r"
    delays = slow_save(write=draw.uniform(0, 0.03), commit=draw.uniform(0, 0.03))
    endure(*JOB, "run.name=r", delays, *_kills(draw, 8, 58), cwd=tmp_path)
    assert len(events(run, "restored")) >= 2
    assert_same(unbroken(*JOB), run)


def test_five_kills_at_random_times(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    draw = _random()
    run = tmp_path / "runs" / "r"
    long = tuple(word.replace("max_steps=60", "max_steps=250") for word in JOB)  # longer than all delays together
    words = (*long, "run.name=r", "recipe.step_seconds=0.01", slow_save(write=0.02, commit=0.02))
    for attempt in range(5):
        before = len(events(run, "train_start"))
        job = start(*words, cwd=tmp_path)
        if attempt == 0:
            job.until(lambda: bool(list(run.glob("checkpoints/step_*/.metadata"))))
        elif draw.random() < 0.8:  # else it is killed while it starts or restores
            job.until(lambda number=before: len(events(run, "train_start")) > number)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.3))
        assert job.kill_all() == [-signal.SIGKILL]
    start(*words, cwd=tmp_path).ends(0)
    assert len(events(run, "restored")) >= 2
    assert_same(unbroken(*long), run)


@pytest.mark.timeout(600)
def test_five_kills_at_random_places_of_the_image_recipe(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    draw = _random()
    run = tmp_path / "runs" / "r"
    endure(*IMAGES, "run.name=r", *_kills(draw, 4, 19), cwd=tmp_path)
    assert len(events(run, "restored")) >= 2
    assert compare(unbroken(*IMAGES), run) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_five_kills_at_random_places_of_the_image_recipe_in_full(
    ranks: int, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    draw = _random()
    run = tmp_path / "runs" / "r"
    words = (
        "+recipe=imagenet_resnet", "~callbacks.mlflow", "trainer.max_epochs=null", "trainer.max_steps=30",
        "trainer.global_batch_size=8", "trainer.micro_batch_size=4", "trainer.eval_every=15", "loader.num_workers=2",
        "callbacks.async_checkpoint.every=3", "trainer.ema_decay=0.99", "trainer.precision=bf16",
    )  # fmt: skip
    endure(*words, "run.name=r", *_kills(draw, 5, 29), cwd=tmp_path, ranks=ranks, timeout=FULL_SECONDS)
    assert len(events(run, "restored")) >= 2
    assert compare(unbroken(*words, ranks=ranks, timeout=FULL_SECONDS), run) == []
