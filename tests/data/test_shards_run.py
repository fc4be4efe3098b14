"""Runs that train from shards: killed they go on bit for bit, in another shape each sample still comes once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from shard_sets import numbered, write, write_tar
from support import assert_same, committed_steps, endure, events, every_step, global_batches, kill_at, settle, start

COUNTS = [30, 5, 41, 20]  # 96: 12 steps of 8 an epoch


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The words of the job that reads the shards of `COUNTS`, buffered by 10."""
    folder = write(tmp_path_factory.mktemp("shards"), "tar", COUNTS)
    return words(folder)


def words(folder: Path) -> tuple[str, ...]:
    transform = "{_target_: job_shards.Numbered}"
    return (
        "+recipe=job", "trainer.eval_every=null", "trainer.eval_at_end=false", settle(),
        f"data.train={{_target_: framework.data.ShardStream, source: {folder}, fields: [cls], buffer: 10, samples: null, "
        f"transform: {transform}}}",
    )  # fmt: skip


def seen(run: Path, ranks: int) -> Counter[int]:
    """How often each sample was trained in the kept history, of the ranks that there ever were."""
    batches: dict[int, list[int]] = {}
    for rank in range(ranks):
        for line in every_step(run, rank):
            batches.setdefault(line.step, []).extend(line.ids)
    return Counter(number for ids in batches.values() for number in ids)


@pytest.mark.parametrize(("ranks", "workers"), [pytest.param(1, 0, marks=pytest.mark.soak), (2, 2)])
def test_killed_runs_go_on_bit_for_bit(
    ranks: int, workers: int, job: tuple[str, ...], tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    job = (*job, "trainer.max_steps=30", f"loader.num_workers={workers}", "loader.position=shards")
    kills = (kill_at(8, "backward", rank=ranks - 1, name="a"), kill_at(16, "after_update", name="b"))
    endure(*job, *kills, "run.name=r", cwd=tmp_path, ranks=ranks)
    run = tmp_path / "runs" / "r"
    assert len(events(run, "restored")) == 2
    assert_same(unbroken(*job, ranks=ranks), run, ranks)
    batches = global_batches(run, ranks)
    for epoch in range(2):
        assert sorted(i for step in range(12) for i in batches[12 * epoch + step + 1]) == list(range(96))


def test_worlds_1_2_4_1_train_each_sample_once(job: tuple[str, ...], tmp_path: Path) -> None:
    job = (*job, "run.name=r", "callbacks.async_checkpoint.every=1")
    run = tmp_path / "runs" / "r"
    trained: Counter[int] = Counter()
    at = 0
    for ranks, workers, stop in ((1, 3, 4), (2, 0, 7), (4, 0, 10), (1, 2, 24)):
        start(
            *job, f"trainer.max_steps={stop}", f"loader.num_workers={workers}", "trainer.micro_batch_size=2",
            cwd=tmp_path, ranks=ranks,
        ).ends(0)  # fmt: skip
        assert committed_steps(run)[0] == stop
        for rank in range(ranks):
            lines = [line for line in every_step(run, rank) if at < line.step <= stop]
            assert len(lines) == stop - at
            trained.update(number for line in lines if line.step <= 12 for number in line.ids)
        at = stop
    assert trained == Counter(range(96))
    last = [number for line in every_step(run) if line.step > 12 for number in line.ids]
    assert sorted(last) == list(range(96))


def test_a_resume_over_other_shards_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "shards", "tar", COUNTS)
    job = (*words(folder), "run.name=r")
    start(*job, "trainer.max_steps=3", cwd=tmp_path).ends(0)
    write_tar(folder / "s900.tar", numbered(90, 5))
    run = start(*job, "trainer.max_steps=6", cwd=tmp_path).ends(1)
    assert "1 added ('s900.tar')" in run.output() and "101" in run.output()
    (folder / "s900.tar").unlink()
    run = start(*job, "trainer.max_steps=6", "loader.position=offset", cwd=tmp_path).ends(1)
    assert "loader.position=offset" in run.output() and "ShardStream" in run.output()
    start(*job, "trainer.max_steps=6", cwd=tmp_path).ends(0)
