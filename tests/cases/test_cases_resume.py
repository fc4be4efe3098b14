"""Resume exactness: RE-01, RE-02, RE-06, RE-08, RE-10, RE-12, RE-17."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from case_tools import MLFLOW, PARTS, mlflow_runs, part, state_of
from support import (
    assert_same,
    checkpoint,
    committed_steps,
    contents,
    differences,
    endure,
    events,
    every_step,
    history,
    kept,
    kill_at,
    start,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.jobs.job import mlp

THREE_EPOCHS = ("+recipe=job", "trainer.max_steps=36")


@pytest.mark.parametrize("last", [1, 5, 11])
def test_re_01_a_run_resumed_in_mid_epoch_equals_the_unbroken_one(
    last: int, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """A run stopped mid-epoch and resumed gives other numbers than the run that was never stopped."""
    words = (*THREE_EPOCHS, "callbacks.async_checkpoint.every=1", part("Synchronous"))
    endure(*words, "run.name=r", kill_at(last + 1, "forward"), cwd=tmp_path)
    run, whole = tmp_path / "runs/r", unbroken(*words)
    assert [event["step"] for event in events(run, "restored")] == [last]
    assert_same(whole, run)
    assert [key for key in history(run) if key.startswith("loss.")] == [f"loss.{step}" for step in range(1, 37)]


def test_re_02_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next_one(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """A checkpoint written at the end of an epoch makes the resumed run repeat that epoch, or do one extra step."""
    words = (*THREE_EPOCHS, "callbacks.async_checkpoint.every=12", part("Synchronous"))
    endure(*words, "run.name=r", kill_at(13, "forward"), cwd=tmp_path)
    run, whole = tmp_path / "runs/r", unbroken(*words)
    assert [event["step"] for event in events(run, "restored")] == [12]
    resumed = next(line for line in every_step(run) if line.attempt == 2)
    assert (resumed.epoch, resumed.step) == (1, 13) and resumed.ids == kept(whole)[13].ids
    assert list(kept(run)) == list(range(1, 37)) and checkpoint(run).step == 36


def test_re_06_epochs_after_the_resumed_one_are_whole(tmp_path: Path) -> None:
    """The skip made for the resumed epoch is applied again in all later epochs, so they are short."""
    words = (*THREE_EPOCHS, "callbacks.async_checkpoint.every=4", "loader.num_workers=2", "run.name=r")
    endure(*words, part("Synchronous"), kill_at(9, "forward"), cwd=tmp_path)
    assert [event["step"] for event in events(tmp_path / "runs/r", "restored")] == [8]
    for epoch in range(3):
        batches = [line.ids for line in kept(tmp_path / "runs/r").values() if line.epoch == epoch]
        assert len(batches) == 12 and len({number for ids in batches for number in ids}) == 96


def test_re_08_a_finished_run_started_again_touches_nothing(tmp_path: Path, with_store: Callable[[Path], Path]) -> None:
    """Rerunning a finished run trains one more step, hangs, rewrites the last checkpoint or crashes."""
    root = with_store(tmp_path)
    words = ("+recipe=job", "run.name=r", MLFLOW)
    start(*words, "trainer.max_steps=20", cwd=tmp_path).ends(0)
    files, logged = state_of(root / "r"), mlflow_runs(root)
    assert logged["r"][0].points["train/loss"] == 20
    for steps in (20, 10):
        again = start(*words, f"trainer.max_steps={steps}", cwd=tmp_path).ends(0, timeout=15)
        assert "finished at step 20" in again.output()
        assert state_of(root / "r") == files  # checkpoints and journal too: no step was made
    assert mlflow_runs(root) == logged and len(logged["r"]) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("model.hidden=64", ("model.body.0.weight is [32, 16] float32 in the checkpoint and [64, 16] float32 here",)),
        (f"model._target_={PARTS}.deeper", ("missing in the checkpoint: model.middle.weight [32, 32]",)),
        (f"model._target_={PARTS}.headless", ("only in the checkpoint: model.head.weight [4, 32]",)),
    ],
)
def test_re_10_a_model_that_changed_is_refused_before_the_first_step(
    change: str, told: tuple[str, ...], tmp_path: Path
) -> None:
    """A model that changed since the checkpoint is loaded in part, or the run quietly restarts from step 0."""
    words = ("+recipe=job", "run.name=r")
    start(*words, "trainer.max_steps=6", cwd=tmp_path).ends(0)
    run = tmp_path / "runs/r"
    before = state_of(run / "checkpoints")
    again = start(*words, "trainer.max_steps=12", change, cwd=tmp_path).ends(1)
    for text in (*told, str(checkpoint(run).path.relative_to(tmp_path))):
        assert text in again.stderr()
    assert state_of(run / "checkpoints") == before
    assert {event["att"] for event in events(run, "train_start") + events(run, "steps")} == {1}


COMPILED = "trainer.compile={backend: eager}"


@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    [((COMPILED,), (), 1), ((), (COMPILED,), 1), ((), (), 2)],
    ids=["compiled to plain", "plain to compiled", "two ranks to one"],
)
def test_re_12_a_checkpoint_loads_with_and_without_wrappers(
    first: tuple[str, ...], second: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    """Checkpoint keys carry prefixes of torch.compile or DDP, so a run without the wrapper cannot load them."""
    words = ("+recipe=job", "run.name=r", part("Weights"))
    start(*words, *first, "trainer.max_steps=6", cwd=tmp_path, ranks=ranks).ends(0)
    run = tmp_path / "runs/r"
    saved = {key.removeprefix("model."): value for key, value in contents(run).items() if key.startswith("model.")}
    names = [key for key in contents(run) if not key.startswith(("shared.", "rank.", "manifest."))]
    assert saved and not any("_orig_mod" in key or "module." in key for key in names)

    start(*words, *second, "trainer.max_steps=8", cwd=tmp_path).ends(0)
    loaded = torch.load(run / "weights/2.start.pt", weights_only=True)
    assert [event["step"] for event in events(run, "restored")] == [6]
    assert differences(saved, loaded) == []

    dcp_to_torch_save(checkpoint(run, 6).path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)["model"]
    model = mlp()
    model.load_state_dict(plain, strict=True)
    assert differences(saved, model.state_dict()) == []


@pytest.mark.parametrize("before", ["absent", "empty", "only logs", "checkpoint"])
def test_re_17_automatic_resume_starts_or_goes_on_with_what_is_there(before: str, tmp_path: Path) -> None:
    """The automatic-resume setting fails on the very first run, or ignores what the last job left."""
    words = ("+recipe=job", "run.name=r", "trainer.max_steps=8")
    run = tmp_path / "runs/r"
    if before == "empty":
        run.mkdir(parents=True)
    elif before == "only logs":
        start(*words, kill_at(3, "forward"), cwd=tmp_path).crashed()
        assert (run / "events").is_dir() and not committed_steps(run)
    elif before == "checkpoint":
        start(*words, kill_at(7, "forward"), part("Synchronous"), cwd=tmp_path).crashed()
    if before != "checkpoint":
        must = start(*words, "run.resume=must", cwd=tmp_path).ends(1)
        assert "runs/r/checkpoints" in must.stderr()
        assert "Traceback" not in must.stderr()
    done = start(*words, "run.resume=auto", cwd=tmp_path).ends(0)
    assert done.output().count("starting at step 0") == (0 if before == "checkpoint" else 1)
    assert [event["step"] for event in events(run, "restored")] == ([5] if before == "checkpoint" else [])
    assert committed_steps(run)[0] == 8
