"""Where checkpoints are written, and how many stay: CK-08, CK-12, CK-16."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from case_tools import part, tree
from support import assert_same, committed_steps, events, kill_at, settle, start

from framework.errors import EXIT_ERROR


@pytest.mark.parametrize("keep", ["-1", "0"])
def test_ck_08_a_number_that_would_keep_nothing_is_refused(keep: str, tmp_path: Path) -> None:
    """keep=-1 meant 'all' in the manual but deleted every checkpoint."""
    run = start("+recipe=job", f"callbacks.async_checkpoint.keep={keep}", "run.name=r", cwd=tmp_path)
    run.ends(EXIT_ERROR)
    assert f"callbacks.async_checkpoint.keep={keep} would delete every checkpoint" in run.output()
    assert tree(tmp_path) == set()


@pytest.mark.parametrize(("keep", "kept"), [("null", list(range(50, 0, -5))), ("1", [50])])
def test_ck_08_all_or_the_newest_stay(keep: str, kept: list[int], tmp_path: Path) -> None:
    """keep=-1 meant 'all' in the manual but deleted every checkpoint: what the other values do."""
    words = ("+recipe=job", "trainer.max_steps=50", "run.name=r", f"callbacks.async_checkpoint.keep={keep}", settle())
    start(*words, cwd=tmp_path).ends(0)
    assert committed_steps(tmp_path / "runs/r") == kept


def read_only(tmp_path: Path) -> tuple[str, ...]:
    folder = tmp_path / "runs/r/checkpoints"
    folder.mkdir(parents=True)
    folder.chmod(0o555)
    return ("run.name=r", part("Unprivileged"))


def a_file(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "runs/r/checkpoints"
    file.parent.mkdir(parents=True)
    file.write_text("not a folder")
    return ("run.name=r",)


def below_a_missing_mount(tmp_path: Path) -> tuple[str, ...]:
    return ("run.dir=/proc/not-mounted/r",)  # not even root can make a folder there


@pytest.mark.parametrize(
    ("prepare", "path", "reason"),
    [
        (read_only, "runs/r/checkpoints", "Permission denied"),
        (a_file, "runs/r/checkpoints", "Not a directory"),
        (below_a_missing_mount, "/proc/not-mounted/r", "No such file or directory"),
    ],
)
def test_ck_12_a_target_that_cannot_be_written_ends_the_run_before_its_first_step(
    prepare: Callable[[Path], tuple[str, ...]], path: str, reason: str, tmp_path: Path
) -> None:
    """Checkpoint target is not writable and this is found out only after hours, or never."""
    words = ("+recipe=job", "callbacks.async_checkpoint.every=1000", *prepare(tmp_path))
    run = start(*words, cwd=tmp_path).ends(EXIT_ERROR)
    assert path in run.output() and reason in run.output()
    log = tmp_path / "runs/r/ids/rank0.jsonl"
    assert not log.exists() or log.read_text() == ""


def test_ck_16_a_second_run_in_a_directory_is_refused_and_a_dead_owner_blocks_nobody(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """Two live runs write to one directory and load each other's files."""
    words = ("+recipe=job", "trainer.max_steps=60", settle())
    command, run = (*words, "run.name=r", kill_at(30, "backward")), tmp_path / "runs/r"
    both = [start(*command, "recipe.step_seconds=0.1", cwd=tmp_path) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not any(job.wait_any(0.05) for job in both) and time.monotonic() < deadline:
        pass
    (second,) = [job for job in both if job.codes]
    (first,) = [job for job in both if job is not second]
    second.ends(EXIT_ERROR)
    assert f"{run.relative_to(tmp_path)} belongs to a live run: pid {first.pids[0]} on {socket.gethostname()}" in (
        second.output()
    )
    first.crashed()
    start(*command, cwd=tmp_path).ends(0)
    assert_same(unbroken(*words), run)


def test_ck_16_a_run_that_was_copied_elsewhere_goes_on_there(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    """Two live runs write to one directory and load each other's files: copies are runs of their own."""
    words = ("+recipe=job", "trainer.max_steps=60", settle())
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    job = start(*words, "run.name=r", "recipe.step_seconds=0.05", cwd=here)
    job.until(lambda: len(events(here / "runs/r", "save_committed")) >= 3)
    job.kill()
    job.crashed()
    shutil.copytree(here / "runs", there / "runs")
    shutil.move(here / "runs", here / "old")
    start(*words, "run.name=r", cwd=there).ends(0)
    (restored,) = events(there / "runs/r", "restored")
    assert restored["step"] >= 15
    assert_same(unbroken(*words), there / "runs/r")
