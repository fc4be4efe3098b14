"""A model that changed, or is wrapped, on several ranks and with permission: RE-10, RE-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from case_tools import PARTS, part, state_of
from support import checkpoint, committed_steps, contents, differences, events, start
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.jobs.job import mlp

WORDS = ("+recipe=job", "run.name=r")


def saved_model(run: Path, step: int) -> dict[str, Any]:
    return {key.removeprefix("model."): value for key, value in contents(run, step).items() if key.startswith("model.")}


def test_re_10_every_rank_refuses_a_model_that_changed(tmp_path: Path) -> None:
    """A model that changed since the checkpoint is loaded in part: on two ranks."""
    start(*WORDS, "trainer.max_steps=6", cwd=tmp_path, ranks=2).ends(0)
    run = tmp_path / "runs/r"
    before = state_of(run / "checkpoints")
    again = start(*WORDS, "trainer.max_steps=12", "model.hidden=64", cwd=tmp_path, ranks=2).ends(1)
    assert "model.body.0.weight is [32, 16] float32 in the checkpoint and [64, 16] float32 here" in again.stderr()
    assert "does not fit the state of this run" in again.stderr(1)
    assert str(checkpoint(run).path.relative_to(tmp_path)) in again.stderr()
    assert state_of(run / "checkpoints") == before


def test_re_10_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    """A model that changed since the checkpoint is loaded in part: nothing of it fits any more."""
    start(*WORDS, "trainer.max_steps=6", cwd=tmp_path).ends(0)
    again = start(*WORDS, "trainer.max_steps=12", f"model._target_={PARTS}.renamed", cwd=tmp_path).ends(1)
    lines = [line for line in again.stderr().splitlines() if "in the checkpoint: " in line]
    assert 15 <= len(lines) <= 25 and " more" in again.stderr()
    assert any("missing in the checkpoint: model." in line for line in lines)


def test_re_10_what_fits_is_taken_over_if_that_is_permitted(tmp_path: Path) -> None:
    """A model that changed since the checkpoint: the difference is meant."""
    words = (*WORDS, part("Weights"))
    start(*words, "trainer.max_steps=6", cwd=tmp_path).ends(0)
    run = tmp_path / "runs/r"
    changed = (f"model._target_={PARTS}.deeper", "run.allow=[model]")
    start(*words, *changed, "trainer.max_steps=12", cwd=tmp_path).ends(0)
    begun = torch.load(run / "weights/2.start.pt", weights_only=True)
    before = saved_model(run, 6)
    assert set(begun) - set(before) == {"middle.weight", "middle.bias"}
    assert differences(before, {key: begun[key] for key in before}) == []
    (restored,) = events(run, "restored")
    assert restored["step"] == 6 and committed_steps(run)[0] == 12
    assert "middle.weight is not in the checkpoint as it is here; it is as built" in restored["notes"]


def test_re_12_wrappers_inside_of_the_model_are_in_no_key(tmp_path: Path) -> None:
    """Checkpoint keys carry wrapper prefixes: of parts that are compiled or compute their activations again."""
    wrapped = f"model._target_={PARTS}.wrapped"
    start(*WORDS, wrapped, "trainer.max_steps=6", cwd=tmp_path).ends(0)
    run = tmp_path / "runs/r"
    names = [key for key in contents(run) if not key.startswith(("shared.", "rank.", "manifest."))]
    assert names and not any("_orig_mod" in key or "_checkpoint_wrapped" in key for key in names)
    dcp_to_torch_save(checkpoint(run, 6).path, tmp_path / "plain.pt")
    model = mlp()
    model.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True)["model"], strict=True)
    assert differences(saved_model(run, 6), model.state_dict()) == []
    start(*WORDS, "trainer.max_steps=8", cwd=tmp_path).ends(0)
    start(*WORDS, wrapped, "trainer.max_steps=10", cwd=tmp_path).ends(0)
    assert [event["step"] for event in events(run, "restored")] == [6, 8]
