"""Asynchronous saves: AS-01, AS-04, AS-07, AS-09."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from case_tools import MLFLOW, PARTS, part
from support import checkpoint, committed_steps, contents, differences, events, start

from framework.checkpoint.verify import check_bytes, check_structure


def verified(run: Path, step: int) -> None:
    """Fails unless there is a checkpoint of that step and every byte of it is right."""
    found = checkpoint(run, step)
    manifest, _ = check_structure(found.path, step)
    check_bytes(found.path, manifest)


def test_as_01_a_file_written_beside_the_steps_holds_one_step_alone(tmp_path: Path) -> None:
    """Background writing uses live CPU tensors, so one file mixes weights of several steps."""
    words = ("+recipe=job", "trainer.max_steps=120", "recipe.step_seconds=0.005", "callbacks.async_checkpoint.every=10")
    words = (*words, "callbacks.async_checkpoint.keep=null", "trainer.eval_every=null")
    start(*words, "run.name=reference", part("Reference"), part("Synchronous"), cwd=tmp_path).ends(0)
    start(*words, "run.name=slow", part("SlowDisk", seconds=0.3), cwd=tmp_path).ends(0)
    run = tmp_path / "runs/slow"
    assert events(run, "save_skipped") and len(committed_steps(run)) >= 2  # steps went on while a save was written
    for step in committed_steps(run):
        saved = {key: value for key, value in contents(run, step).items() if key.startswith(("model.", "optimizer."))}
        expected = flat_reference(tmp_path / "runs/reference/reference" / f"{step}.pt")
        assert differences(expected, saved) == [], f"step {step}"


def flat_reference(file: Path) -> dict[str, torch.Tensor]:
    """What `case_parts.Reference` wrote, under the keys of a checkpoint."""
    state = torch.load(file, weights_only=True)
    parameters = [key for key in state["model"] if not key.endswith(("running_mean", "running_var", "tracked"))]
    flat = {f"model.{key}": value for key, value in state["model"].items()}
    for index, items in state["optimizer"]["state"].items():
        flat |= {f"optimizer.main.state.{parameters[index]}.{item}": value for item, value in items.items()}
    return flat


def test_as_04_the_process_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    """The process ends while the last checkpoint is still being written."""
    run = start("+recipe=job", "trainer.max_steps=6", part("SlowDisk", seconds=2), "run.name=r", cwd=tmp_path).ends(0)
    verified(tmp_path / "runs/r", 6)
    (committed,) = [event for event in events(tmp_path / "runs/r", "save_committed") if event["step"] == 6]
    (end,) = events(tmp_path / "runs/r", "end")
    assert committed["persist_seconds"] >= 2 and end["t"] >= committed["t"]
    assert "step 6: saving" in run.output()


def test_as_04_an_exit_in_the_users_code_waits_for_the_save_under_way(tmp_path: Path) -> None:
    """The process ends while the last checkpoint is still being written: sys.exit() in a step."""
    words = (f"recipe._target_={PARTS}.FailingJob", "recipe.at=8", "recipe.how=exit", "run.name=r")
    run = start("+recipe=job", *words, part("SlowDisk", seconds=2), cwd=tmp_path)
    assert run.wait() != [0]  # the budget is not used up: a launcher must not take this for the end
    verified(tmp_path / "runs/r", 5)
    (end,) = events(tmp_path / "runs/r", "end")
    assert (end["status"], end["exit_code"]) == ("failed", run.codes[0])
    assert "finishing the save under way" in run.output()


@pytest.mark.cold
def test_as_04_a_job_of_a_sweep_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    """The process ends while the last checkpoint is still being written: the end of a job of a sweep."""
    words = ("-m", "+recipe=job", "trainer.max_steps=6", "seed=1", part("SlowDisk", seconds=2), "run.name=r")
    start(*words, cwd=tmp_path).ends(0, timeout=120)
    verified(tmp_path / "runs/r", 6)
    assert "step 6: saving" in (tmp_path / "runs/r/train.log").read_text()


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_as_07_what_is_told_to_be_saved_is_there_after_a_kill(rounds: int, tmp_path: Path) -> None:
    """Log, metric or callback says 'saved' when the write has only been queued."""
    words = ("+recipe=job", "trainer.max_steps=100000", "recipe.step_seconds=0.005", "trainer.eval_every=null")
    words = (*words, "callbacks.async_checkpoint.every=20", part("Saved"), part("SlowDisk", seconds=1), "run.name=r")
    run, told = tmp_path / "runs/r", tmp_path / "runs/r/saved"
    last = 0
    for number in range(rounds):
        job = start(*words, cwd=tmp_path)
        if number:
            job.until(lambda number=number: len(events(run, "restored")) == number)
            assert events(run, "restored")[-1]["step"] == last
        before = len(told.read_text().split()) if told.exists() else 0
        job.until(lambda before=before: told.exists() and len(told.read_text().split()) > before)
        job.kill()
        job.crashed()
        said = [int(step) for step in told.read_text().split()]
        said += [event["step"] for event in events(run, "save_committed")]
        last = max(said)
        assert last > 0 and committed_steps(run)[0] == last
        verified(run, last)
        assert f"step {last}: saved" in job.output() or last == int(told.read_text().split()[-1])


@pytest.mark.parametrize(
    ("runs", "epochs"), [(1, 40), pytest.param(5, 300, marks=[pytest.mark.soak, pytest.mark.timeout(1600)])]
)
def test_as_09_saves_beside_loader_processes_never_stop_the_run(
    runs: int, epochs: int, tmp_path: Path, with_store: Callable[[Path], Path]
) -> None:
    """Background thread and forked loader workers deadlock now and then; run hangs with 0 % CPU."""
    with_store(tmp_path)
    words = ("+recipe=job", "data.train.samples=16", "~trainer.max_steps", f"trainer.max_epochs={epochs}", MLFLOW)
    words = (*words, "loader.num_workers=2", "callbacks.async_checkpoint.every=1", "trainer.eval_every=null")
    for number in range(runs):  # that no child is left is checked after every test
        start(*words, f"run.name=r{number}", cwd=tmp_path).ends(0, timeout=300)
        assert committed_steps(tmp_path / f"runs/r{number}")[0] == 2 * epochs
