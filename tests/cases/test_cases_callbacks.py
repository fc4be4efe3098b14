"""Callbacks: CB-02, CB-04."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from case_tools import MLFLOW, mlflow_runs, part
from support import endure, events, kill_at, start
from test_cases_saving import verified


def test_cb_02_two_callbacks_of_one_class_keep_their_own_state(tmp_path: Path) -> None:
    """Two callbacks of one class overwrite each other's saved state."""
    words = ("+recipe=job", "run.name=r", part("Synchronous"), kill_at(14, "forward"))
    each, third = part("Counter", "each", every=1), part("Counter", "third", every=3)
    endure(*words, each, third, "trainer.max_steps=24", cwd=tmp_path)
    run = tmp_path / "runs/r"
    assert [event["step"] for event in events(run, "restored")] == [10]
    counts = {name: int((run / f"{name}.count").read_text()) for name in ("each", "third")}
    assert counts == {"each": 24, "third": 8}
    start(*words, third, each, "trainer.max_steps=36", cwd=tmp_path).ends(0)  # the other way round
    counts = {name: int((run / f"{name}.count").read_text()) for name in ("each", "third")}
    assert counts == {"each": 36, "third": 12}


def test_cb_04_an_error_in_a_callback_ends_the_run_in_order(tmp_path: Path, with_store: Callable[[Path], Path]) -> None:
    """An error in one callback: others not closed, original error hidden, pending save lost."""
    root = with_store(tmp_path)
    words = ("+recipe=job", "run.name=r", "callbacks.async_checkpoint.every=9", part("SlowDisk", seconds=2), MLFLOW)
    troubled = (
        part("Troubled", "first"), part("Troubled", "third_party", step=10), part("Troubled", "stuck", in_close=True)
    )  # fmt: skip
    run = start(*words, *troubled, cwd=tmp_path).ends(1)
    error = run.stderr()
    assert "LookupError: the third party lost something" in error and "callback 'third_party'" in error
    first = error.index("Traceback (most recent call last)")
    assert "RuntimeError: the door is stuck" in error
    assert "LookupError" in error[first:].split("Traceback (most recent call last)")[1]
    assert sorted((root / "r/closes").read_text().split()) == ["first", "stuck", "third_party"]
    verified(root / "r", 9)
    (end,) = events(root / "r", "end")
    assert (end["status"], end["step"]) == ("failed", 10)
    assert [logged.status for logged in mlflow_runs(root)["r"]] == ["FAILED"]
