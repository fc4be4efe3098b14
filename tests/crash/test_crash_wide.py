"""Shards large enough to be written past the page cache: killed at random times, a run ends with the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from support import assert_same, events, start

from framework.checkpoint.direct import LEAST_BYTES

JOB = (
    "+recipe=job", "trainer.max_steps=60", "trainer.eval_every=null", "model.hidden=150000", "loader.num_workers=1",
    "callbacks.async_checkpoint.every=2",
)  # fmt: skip
MOST_KILLS = 15


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_times_it_ends_with_the_same_bits(ranks: int, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    chance = random.Random(seed)
    start(*JOB, "run.name=unbroken", cwd=tmp_path, ranks=ranks).ends(0, timeout=400)
    unbroken, run = tmp_path / "runs" / "unbroken", tmp_path / "runs" / "r"
    shards = list(unbroken.rglob("*.distcp"))
    assert shards and min(shard.stat().st_size for shard in shards) > LEAST_BYTES
    for _ in range(MOST_KILLS):
        job = start(*JOB, "run.name=r", "recipe.step_seconds=0.15", cwd=tmp_path, ranks=ranks)
        end = time.monotonic() + chance.uniform(1.5, 5)
        while time.monotonic() < end and not job.codes:
            job.wait_any(0.05)
        if job.codes:
            break
        job.kill_all()
    job.kill_all() if job.codes else start(*JOB, "run.name=r", cwd=tmp_path, ranks=ranks).ends(0, timeout=400)
    restored = [event["step"] for event in events(run, "restored")]
    print(f"restored {restored}")
    assert len(restored) >= 2
    assert_same(unbroken, run, ranks=ranks)
