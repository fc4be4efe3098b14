"""What differs between a checkpoint and the run that goes on from it is told or refused."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.callback import Callback
from framework.errors import StateMismatchError
from framework.trainer import Trainer
from tests.loop.runs import (
    Fit,
    Points,
    adam,
    assert_same,
    core,
    events,
    fit,
    flat,
    make,
    net,
    saved_steps,
    sgd,
)


def config(**changes: Any) -> dict[str, Any]:
    """A config as a run has it; `a__b=1` sets the key `a.b`."""
    nested: dict[str, Any] = {
        "seed": 0,
        "run": {"name": "r", "resume": "auto"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05},
        "trainer": {"max_steps": 4, "global_batch_size": 8, "eval_every": None},
        "loader": {"num_workers": None},
        "callbacks": {"async_checkpoint": {"every": 4}, "gone": {"_target_": "x.Gone", "level": 3}},
    }
    for name, value in changes.items():
        group, _, key = name.partition("__")
        nested[group] = {**nested[group], key: value}
    return nested


def resumed_notes(folder: Path, *arguments: Any, **options: Any) -> list[str]:
    fit(folder, *arguments, **options)
    return events(folder, "restored")[-1]["notes"]  # type: ignore[no-any-return]


def test_what_the_new_config_changes_is_told_and_wins(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4, config=config())
    changed = config(
        trainer__max_steps=12, trainer__eval_every="1epochs", optimizer__lr=0.5, run__name="other", callbacks__gone=None,
        callbacks__new={"_target_": "x.New", "level": 1}, callbacks__async_checkpoint={"every": 2},
    )  # fmt: skip
    every = core(every=2)
    faster = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    notes = resumed_notes(tmp_path, Fit(optimizer=faster), every, config=changed)
    assert sorted(notes) == [
        "callbacks.async_checkpoint.every is now 2, was 4",
        "callbacks.new is new; it starts without a state",
        "optimizer main: lr is now 0.5, was 0.05",
        "optimizer.lr is now 0.5, was 0.05",
        "trainer.eval_every is now '1epochs', was None",
        "trainer.max_steps is now 12, was 4",
    ]
    assert saved_steps(tmp_path) == [4, 6, 8, 10, 12]


def test_the_way_a_batch_is_computed_may_change_and_is_told(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Fit(model=partial(net, 0.0)))
    fit(tmp_path / "cut", Fit(model=partial(net, 0.0)), max_steps=4)
    trainer = make(tmp_path / "cut", Fit(model=partial(net, 0.0)), micro_batch_size=2)
    trainer.loader_settings.num_workers = 1
    assert trainer.fit() == 0
    assert events(tmp_path / "cut", "restored")[0]["notes"] == [
        "micro-batch is now 2, was 8",
        "loader workers is now 1, was 0",
    ]
    assert_same(flat(whole), flat(trainer), close=1e-5)


def test_nothing_is_told_where_nothing_differs(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4, config=config())
    assert resumed_notes(tmp_path, config=config()) == []


def test_a_config_of_any_shape_in_a_checkpoint_is_only_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "marker"
    wild = config(optimizer___target_="os.system", optimizer__command=f"touch {marker}", trainer__long="x" * 10_000)
    wild["many"] = {f"key{n}": n for n in range(50)}
    fit(tmp_path / "r", max_steps=4, config=wild)
    with caplog.at_level(logging.WARNING):
        notes = resumed_notes(tmp_path / "r", config=config())
    assert not marker.exists()
    assert "optimizer._target_ is now 'torch.optim.SGD', was 'os.system'" in notes
    assert notes[-1] == "… and 23 more keys of the config" and max(map(len, notes)) < 300
    assert "resume: optimizer._target_ is now" in caplog.text


class Look(Callback):
    """Keeps the weights that the model has when the run begins, and whether it got there."""

    def __init__(self) -> None:
        self.built: dict[str, torch.Tensor] = {}
        self.is_restored = False

    def setup(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.built = flat(trainer)

    def state_loaded(self, trainer: Trainer, found: object) -> None:
        self.is_restored = True


WIDE = partial(nn.Sequential, nn.Linear(4, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seed": 4}, ("seed=4", "seed=0", "run.allow=[seed]")),
        ({"recipe": {"train_data": lambda: Points(65)}}, ("samples is now 65, was 64", "run.allow=[data]")),
        ({"epoch_end": "drop"}, ("epoch_end is now 'drop', was 'carry'", "run.allow=[data]")),
        ({"recipe": {"optimizer": adam}}, ("torch.optim.sgd.SGD", "torch.optim.adamw.AdamW", "run.allow=[optimizer]")),
        (
            {"recipe": {"model": WIDE}},
            ("[8, 4] float32 in the checkpoint and [9, 4] float32 here", "run.allow=[model]"),
        ),
    ],
    ids=["seed", "data", "epoch end", "optimizer", "model"],
)
def test_what_would_be_another_run_is_refused_before_anything_changes(
    options: dict[str, Any], told: tuple[str, ...], tmp_path: Path
) -> None:
    fit(tmp_path, max_steps=4)
    recipe = options.pop("recipe", {})
    look = Look()
    with pytest.raises(StateMismatchError) as caught:
        make(tmp_path, Fit(**recipe), core(look=look), **options).fit()
    for text in told:
        assert text in str(caught.value)
    assert not look.is_restored
    assert_same(look.built, flat(look.trainer))
    assert saved_steps(tmp_path) == [4]


def test_another_model_can_be_permitted_and_takes_over_what_fits(tmp_path: Path) -> None:
    before = fit(tmp_path, Fit(optimizer=adam, eval_data=Points), max_steps=4, ema_decay=0.9)
    recipe = Fit(optimizer=adam, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)))
    recipe.train_step = lambda model, batch: model(batch["x"]).square().mean()  # type: ignore[method-assign]
    look = Look()
    trainer = fit(tmp_path, recipe, core(look=look), max_steps=5, ema_decay=0.9, run={"allow": ["model"]})
    (restored,) = events(tmp_path, "restored")
    assert restored["step"] == 4 and trainer.progress.step == 5
    assert "3.weight is not in the checkpoint as it is here; it is as built" in restored["notes"]
    state = trainer.built.optimizers["main"].state
    model: Any = trainer.built.model
    assert int(state[model[0].weight]["step"]) == 5 and int(state[model[3].weight]["step"]) == 1
    old, new = flat(before), flat(trainer)
    assert torch.allclose(old["model.0.weight"], new["model.0.weight"], atol=0.05)
    assert new["ema.3.weight"].shape == (3, 8)


def test_an_optimizer_that_is_gone_is_refused_and_can_be_permitted(tmp_path: Path) -> None:
    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    fit(tmp_path, Fit(model=pair, optimizer={"0": sgd, "1": adam}), max_steps=4)
    one = Fit(model=pair, optimizer={"0": sgd})
    with pytest.raises(StateMismatchError, match=r"run\.allow=\[optimizer\]"):
        make(tmp_path, one).fit()
    notes = resumed_notes(tmp_path, Fit(model=pair, optimizer={"0": sgd}), run={"allow": ["optimizer"]})
    assert "optimizer 1 of the checkpoint is dropped" in notes
