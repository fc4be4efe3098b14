"""What an attempt that ended without a word left behind: its files, its lease, and what the other ranks wrote."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from goodput_runs import Run
from support import events, kill_at, start

from framework.goodput.accounts.signs import Signs, newest_signs
from framework.goodput.reporting.report import build
from framework.journal import Journal


def owned(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.directory.acquire().release()
    return run.start(1).steps(1, 20)


def test_the_newest_attempt_is_known_by_its_files_and_what_others_said(tmp_path: Path) -> None:
    run = owned(tmp_path)
    assert newest_signs(run.directory, None) == Signs(1, None, None)
    owner = run.directory.owner()
    assert owner is not None
    os.utime(run.journal.path, (1000.5, 1000.5))
    assert newest_signs(run.directory, owner) == Signs(1, 1000.5, None)
    told = []
    for rank in (1, 2):
        told.append(time.time())
        other = Journal(run.directory.events_file(1, rank), 1)
        other.event("failure", type="E", message="rank 0 is gone")
        other.event("end")
        other.close()
    signs = newest_signs(run.directory, owner)
    assert signs is not None and signs.noticed is not None
    assert told[0] <= signs.noticed <= told[1], "the first failure"


def test_a_copy_of_a_run_is_not_taken_for_one_that_lived_until_it_was_copied(tmp_path: Path) -> None:
    run = owned(tmp_path)
    run.journal.close()
    long_ago = time.time() - 5000
    os.utime(run.journal.path, (long_ago, long_ago))
    wall = build(run.path).goodput.wall
    copy = Path(shutil.copytree(run.path, tmp_path / "copy", copy_function=shutil.copyfile))
    os.utime(copy / "events/att-0001/rank0.jsonl", (time.time() + 3000,) * 2)
    assert build(copy).goodput.wall == pytest.approx(wall, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_attempt_writes_down_what_it_found(ranks: int, tmp_path: Path) -> None:
    words = ("+recipe=job", "run.name=r", "trainer.max_steps=12")
    first = start(*words, kill_at(7, "backward"), cwd=tmp_path, ranks=ranks)
    first.crashed() if ranks > 1 else first.ends(-signal.SIGKILL)
    began = str(time.time() - 0.5)
    start(*words, cwd=tmp_path, ranks=ranks, env={"SLURM_JOB_START_TIME": began}).ends(0)
    one, two = events(tmp_path / "runs/r", "attempt_start")
    assert (one["previous"], one["allocated"]) == (None, None)
    assert two["allocated"] == float(began)
    assert two["previous"]["attempt"] == 1
    assert one["t"] <= two["previous"]["alive"] <= two["t"]
    assert (two["previous"]["noticed"] is None) == (ranks == 1)
