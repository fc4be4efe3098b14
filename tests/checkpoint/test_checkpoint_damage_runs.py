"""A run whose newest checkpoint is damaged goes on from the one before, and ends with the same bits."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint_damage as damages
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import snapshot

from framework.callback import Callback
from framework.checkpoint import CheckpointStore
from framework.errors import CheckpointError, StateMismatchError
from framework.trainer import Trainer
from tests.loop.runs import Crash, assert_same, core, events, fit, flat, make

CASES = [
    (".metadata", damages.truncate), (".metadata", damages.flip), (".metadata", damages.swap),
    ("manifest", damages.empty), ("manifest", damages.zero_page), ("__0_0", damages.truncate),
    ("__0_0", damages.empty), ("__0_0", damages.zero_page), ("__0_0", damages.flip), ("__0_0", damages.delete),
    ("__0_0", damages.swap), ("shared", damages.flip), ("shared", damages.delete), ("rank_0", damages.swap),
    ("rank_0", damages.pipe_instead),
]  # fmt: skip


class Begin(Callback):
    """Keeps the weights as they are right before the first step of an attempt."""

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        self.weights = flat(trainer)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed at step 10, with checkpoints of the steps 4 and 8."""
    path = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(RuntimeError, match="crashed at 10"):
        make(path, callbacks=core(crash=Crash(10))).fit()
    return path


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of an undisturbed run at steps 4 and 12."""
    path = tmp_path_factory.mktemp("undamaged")
    middle = flat(fit(path / "middle", max_steps=4))
    return middle, flat(fit(path / "whole"))


@pytest.mark.parametrize(("kind", "damage"), CASES, ids=[f"{kind}-{damage.__name__}" for kind, damage in CASES])
def test_a_run_goes_on_from_the_checkpoint_before_and_ends_with_the_same_bits(
    tmp_path: Path,
    crashed: Path,
    undamaged: tuple[dict[str, Any], dict[str, Any]],
    kind: str,
    damage: Callable[[Path, Path], None],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(crashed, run)
    store = CheckpointStore(run / "checkpoints")
    damage(damages.file_of(store.folder(8), kind), damages.file_of(store.folder(4), kind))
    begin = Begin()
    trainer = fit(run, callbacks=core(begin=begin))
    assert_same(begin.weights, undamaged[0])
    assert_same(flat(trainer), undamaged[1])
    recorded = [event for event in events(run) if event["ev"] in ("set_aside", "steps")]
    (set_aside,) = [event for event in recorded if event["ev"] == "set_aside"]
    after = recorded[recorded.index(set_aside) + 1]
    assert after["ev"] == "steps" and after["first"] == 5
    named = "manifest" if (kind, damage) == (".metadata", damages.swap) else kind
    assert named in set_aside["reason"] and set_aside["moved_to"] == str(store.path / "damaged" / store.folder(8).name)


def test_if_every_checkpoint_is_damaged_the_run_ends_with_an_error_and_touches_none(
    tmp_path: Path, crashed: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(crashed, run)
    store = CheckpointStore(run / "checkpoints")
    for step, kind in ((4, "shared"), (8, "__0_0")):
        damages.flip(damages.file_of(store.folder(step), kind), Path())
    before = snapshot(store.path)
    begin = Begin()
    with pytest.raises(CheckpointError, match="None of 2 checkpoints") as raised:
        make(run, callbacks=core(begin=begin)).fit()
    assert str(store.folder(4)) in str(raised.value) and "__0_0" in str(raised.value)
    assert not hasattr(begin, "weights") and snapshot(store.path) == before
    assert events(run, "end")[-1]["exit_code"] == 1


def test_a_run_begins_with_the_weights_of_a_stock_checkpoint(tmp_path: Path) -> None:
    live = flat(fit(tmp_path / "other", max_steps=1))
    weights = {key.removeprefix("model."): live[key] + 1 for key in live if key.startswith("model.")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optim": {"lr": 0.1}}, checkpoint_id=str(tmp_path / "stock"), no_dist=True)
        dcp.save({"model": {"0.weight": weights["0.weight"]}}, checkpoint_id=str(tmp_path / "part"), no_dist=True)
    begin = Begin()
    fit(tmp_path / "run", callbacks=core(begin=begin), max_steps=1, run={"init_from": str(tmp_path / "stock")})
    assert all(torch.equal(begin.weights[f"model.{key}"], value) for key, value in weights.items())
    with pytest.raises(StateMismatchError, match=r"(?s)run\.init_from=.*missing in the checkpoint: 0\.bias"):
        make(tmp_path / "new", run={"init_from": str(tmp_path / "part")}).fit()
    os.truncate(tmp_path / "stock" / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"run\.init_from=.*__0_0\.distcp"):
        make(tmp_path / "third", run={"init_from": str(tmp_path / "stock")}).fit()
