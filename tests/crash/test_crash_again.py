"""The same command once more: a finished run is not touched, a larger budget extends it, two live runs exclude each other."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from support import assert_same, committed_steps, compare, kill_at, start

JOB = ("+recipe=job",)


def _fingerprint(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every file and folder with its mode, its time of change and a hash of its bytes."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.stat()
        data = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, data)
    return found


def test_finished_run_started_again_touches_nothing(tmp_path: Path) -> None:
    words = (*JOB, "run.name=r", "trainer.max_steps=20")
    start(*words, cwd=tmp_path).ends(0)
    before = _fingerprint(tmp_path / "runs")
    again = start(*words, cwd=tmp_path).ends(0)
    assert "is finished at step 20" in again.output()
    assert _fingerprint(tmp_path / "runs") == before


def test_larger_budget_extends_a_finished_run_to_the_same_bits(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    # a constant rate: that of a cosine depends on where it ends, and an evaluation at the end of the shorter run only
    words = (*JOB, "~schedule", "trainer.eval_at_end=false")
    start(*words, "run.name=r", "trainer.max_steps=20", cwd=tmp_path).ends(0)
    start(*words, "run.name=r", "trainer.max_steps=36", cwd=tmp_path).ends(0)
    assert committed_steps(tmp_path / "runs" / "r")[0] == 36
    assert_same(unbroken(*words, "trainer.max_steps=36"), tmp_path / "runs" / "r")


def test_second_live_run_is_refused_with_the_owner_named_and_the_first_is_not_disturbed(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, "trainer.max_steps=30", "run.name=r", "recipe.step_seconds=0.1")
    first = start(*words, cwd=tmp_path).until(lambda: bool(_steps(run)))
    files = set(run.rglob("att-*"))
    second = start(*words, cwd=tmp_path).ends(1)
    assert f"belongs to a live run: pid {first.pids[0]} " in second.stderr()
    assert "Traceback" not in second.output()
    assert set(run.rglob("att-*")) == files
    first.ends(0)
    assert_same(unbroken(*JOB, "trainer.max_steps=30"), run)


def test_killed_owner_blocks_nothing_even_while_nobody_has_collected_it(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    run = tmp_path / "runs" / "r"
    words = (*JOB, "trainer.max_steps=30", "run.name=r", kill_at(14, "backward"))
    first = start(*words, cwd=tmp_path)
    for _ in range(3000):
        if not first.is_alive():  # and its parent has not asked for its exit code: a zombie
            break
        time.sleep(0.02)
    start(*words, cwd=tmp_path).ends(0)
    first.crashed()
    assert compare(unbroken(*JOB, "trainer.max_steps=30"), run) == []


def _steps(run: Path) -> list[str]:
    log = run / "ids" / "rank0.jsonl"
    return log.read_text().splitlines() if log.exists() else []
