"""A rank that is frozen in the middle of a save: every live rank says who is missing, and no checkpoint is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same, committed_steps, kill_at, settle, start

JOB = ("+recipe=job", "trainer.max_steps=30", "callbacks.async_checkpoint.every=4")
BOUND = 15


@pytest.mark.parametrize(
    ("frozen", "waits"),
    [
        pytest.param(1, False, id="1 beside the steps"),
        pytest.param(1, True, id="1 waited for", marks=pytest.mark.soak),
        pytest.param(0, False, id="0 beside the steps", marks=pytest.mark.soak),
        pytest.param(0, True, id="0 waited for", marks=pytest.mark.soak),
    ],
)
def test_a_rank_frozen_in_a_save_is_named_by_the_others(
    frozen: int, waits: bool, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run, live = tmp_path / "runs/r", 1 - frozen
    words = (*JOB, "run.name=r", f"trainer.timeout={BOUND}s", f"callbacks.async_checkpoint.timeout={BOUND}s")
    words = (*words, *([settle()] if waits else []), kill_at(12, "writing", rank=frozen, number="SIGSTOP"))
    job = start(*words, cwd=tmp_path, ranks=2)
    while live not in job.codes:
        assert job.wait_any(120), job.output()
    assert job.codes[live] == 1
    assert f"rank {frozen} did not come" in job.output(live)
    job.kill_all()
    assert committed_steps(run)[:1] <= [8]
    start(*words, cwd=tmp_path, ranks=2).ends(0)
    assert_same(unbroken(*JOB, ranks=2), run, ranks=2)
