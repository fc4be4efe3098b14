"""Several ranks: whichever is killed, wherever, all go on from the same step with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from support import assert_same, committed_steps, endure, kill_at, settle, start

JOB = ("+recipe=job", "trainer.max_steps=36", "callbacks.async_checkpoint.every=4", settle())


def test_two_ranks_resume_bitwise_equal_after_kills_of_rank_1(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    kills = (
        kill_at(6, "fetch", rank=1, name="a"),
        kill_at(11, "backward", rank=1, name="b"),
        kill_at(17, "after_update", rank=1, name="c"),
        kill_at(20, "staging", rank=1, name="d"),
        kill_at(28, "writing", rank=1, name="e"),
    )
    endure(*JOB, "run.name=r", *kills, cwd=tmp_path, ranks=2)
    assert_same(unbroken(*JOB, ranks=2), tmp_path / "runs" / "r", ranks=2)


def test_two_ranks_with_accumulation_and_workers_resume_bitwise_equal(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    job = (*JOB, "trainer.micro_batch_size=2", "loader.num_workers=1", "trainer.clip_norm=1.0", "trainer.ema_decay=0.9")
    kills = (kill_at(10, "backward", rank=1, count=1, name="a"), kill_at(20, "commit", rank=0, name="b"))
    endure(*job, "run.name=r", *kills, cwd=tmp_path, ranks=2)
    assert_same(unbroken(*job, ranks=2), tmp_path / "runs" / "r", ranks=2)


def test_four_ranks_resume_bitwise_equal_after_kills(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    kills = (
        kill_at(10, "backward", rank=3, name="a"),
        kill_at(16, "writing", rank=2, name="b"),
        kill_at(24, "sealing", rank=0, name="c"),
    )
    endure(*JOB, "run.name=r", *kills, cwd=tmp_path, ranks=4)
    assert_same(unbroken(*JOB, ranks=4), tmp_path / "runs" / "r", ranks=4)


def test_rank_left_alone_ends_by_itself_and_publishes_nothing_more(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, "run.name=r", "trainer.timeout=20s", "callbacks.async_checkpoint.timeout=20s")
    words = (*words, kill_at(16, "writing", rank=1))
    codes = start(*words, cwd=tmp_path, ranks=2).wait()
    assert codes == [1, -signal.SIGKILL]
    assert committed_steps(run)[0] == 12
    start(*words, cwd=tmp_path, ranks=2).ends(0)
    assert_same(unbroken(*JOB, ranks=2), run, ranks=2)
