"""The learning rate of every step is the same with and without an interruption, whoever makes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from framework.errors import ConfigError
from framework.schedules import constant, cosine, linear, wsd
from tests.loop.runs import Crash, Fit, Points, adam, by_step, core, crash_then_resume, events, fit, make


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULES: dict[str, Any] = {
    "constant": partial(constant, warmup="0.5epochs"),
    "linear": partial(linear, warmup=3, final=0.1),
    "cosine": partial(cosine, warmup="0.25epochs"),
    "wsd": partial(wsd, warmup=2, decay=4),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=12),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[3, 5, 9], gamma=0.5),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "SequentialLR": sequential,
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.3),
}


def recipe(name: str) -> Fit:
    return Fit(schedule=SCHEDULES[name], eval_data=lambda: Points(16))


@pytest.mark.parametrize("crash_at", [5, 10])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_has_exactly_the_rates_of_the_unbroken_one(tmp_path: Path, name: str, crash_at: int) -> None:
    fit(tmp_path / "whole", recipe(name), eval_every=1)
    crash_then_resume(tmp_path / "cut", crash_at, partial(recipe, name), eval_every=1)
    whole = by_step(tmp_path / "whole", "lr")
    assert whole == by_step(tmp_path / "cut", "lr") and sorted(whole) == list(range(1, 13))
    assert len(set(whole.values())) > 2
    assert by_step(tmp_path / "whole") == by_step(tmp_path / "cut")


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_the_rate_is_base_times_the_factor_of_the_step(tmp_path: Path, name: str) -> None:
    trainer = fit(tmp_path, recipe(name))
    factor = trainer.recipe.lr_factor
    assert list(by_step(tmp_path, "lr").values()) == [0.05 * factor(step, 12) for step in range(12)]


def test_a_recipe_may_give_the_factor_itself(tmp_path: Path) -> None:
    class Own(Fit):
        def lr_factor(self, step: int, total_steps: int | None) -> float:
            assert total_steps == 12
            return 1.0 / (step + 1)

    fit(tmp_path, Own())
    assert list(by_step(tmp_path, "lr").values()) == [0.05 * (1 / (step + 1)) for step in range(12)]


def test_the_last_step_reaches_the_final_rate(tmp_path: Path) -> None:
    fit(tmp_path, Fit(schedule=partial(cosine, final=0.25)), max_steps=None, max_epochs=1.3)
    rates = by_step(tmp_path, "lr")
    assert max(rates) == 11 and rates[11] == pytest.approx(0.05 * 0.25) and rates[10] > rates[11]


def test_one_cycle_gets_the_length_of_the_run(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
    expected = []
    for _ in range(12):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        if len(expected) < 12:
            theirs.step()
    fit(tmp_path, recipe("OneCycleLR"))
    assert list(by_step(tmp_path, "lr").values()) == expected


def test_a_larger_budget_stretches_a_cycle_whose_length_was_filled_in(tmp_path: Path) -> None:
    fit(tmp_path / "run", recipe("OneCycleLR"))
    fit(tmp_path / "run", recipe("OneCycleLR"), max_steps=20)
    fit(tmp_path / "long", recipe("OneCycleLR"), max_steps=20)
    run, long = by_step(tmp_path / "run", "lr"), by_step(tmp_path / "long", "lr")
    assert [run[step] for step in range(14, 21)] == pytest.approx([long[step] for step in range(14, 21)])


def test_a_time_alone_refuses_what_needs_a_length(tmp_path: Path) -> None:
    for schedule in (cosine, partial(lr_scheduler.OneCycleLR, max_lr=0.1)):
        trainer = make(tmp_path / "run", Fit(schedule=schedule), max_steps=None, max_time="1h")
        with pytest.raises(ConfigError, match=r"needs the number of steps, and only trainer\.max_time"):
            trainer.fit()
    assert not (tmp_path / "run").exists()


def test_a_plateau_without_a_loss_to_watch_is_refused(tmp_path: Path) -> None:
    class NoLoss(Fit):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            return {"score": super().eval_step(model, batch)["loss"]}

    plateau = NoLoss(schedule=SCHEDULES["ReduceLROnPlateau"], eval_data=lambda: Points(16))
    with pytest.raises(ConfigError, match=r"watches eval/loss, and eval_step gave only \['eval/score'\]"):
        make(tmp_path, plateau, eval_every=1).fit()


@pytest.mark.parametrize("name", ["cosine", "LambdaLR", "MultiStepLR", "SequentialLR"])
def test_a_rate_changed_in_the_config_wins_is_announced_and_the_rest_is_restored(tmp_path: Path, name: str) -> None:
    def with_rate(rate: float) -> Fit:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=rate)

        return Fit(schedule=SCHEDULES[name], optimizer=optimizer)

    fit(tmp_path / "whole", with_rate(0.01))
    with pytest.raises(RuntimeError):
        make(tmp_path / "run", with_rate(0.01), core(crash=Crash(5))).fit()
    resumed = fit(tmp_path / "run", with_rate(0.03))
    before, after = by_step(tmp_path / "whole", "lr"), by_step(tmp_path / "run", "lr")
    assert [after[step] for step in range(1, 5)] == [before[step] for step in range(1, 5)]
    assert [after[step] for step in range(5, 13)] == pytest.approx([3 * before[step] for step in range(5, 13)])
    (restored,) = events(tmp_path / "run", "restored")
    assert any("lr is now 0.03, was 0.01" in note for note in restored["notes"])
    moments = resumed.built.optimizers["main"].state
    assert {int(state["step"]) for state in moments.values()} == {12}


def test_what_something_else_changed_in_the_optimizer_is_restored(tmp_path: Path) -> None:
    """An option that the run itself changed, not the config, is that of the checkpoint."""
    with pytest.raises(RuntimeError):
        trainer = make(tmp_path, Fit(optimizer=adam), core(crash=Crash(5)))
        trainer.before_first_step.append(lambda: set_decay(trainer.built.optimizers["main"], 0.5))
        trainer.fit()
    resumed = fit(tmp_path, Fit(optimizer=adam))
    assert resumed.built.optimizers["main"].param_groups[0]["weight_decay"] == 0.5


def set_decay(optimizer: torch.optim.Optimizer, value: float) -> None:
    optimizer.param_groups[0]["weight_decay"] = value
