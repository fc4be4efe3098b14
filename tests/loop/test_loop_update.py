"""From gradients to weights: clipped once, gated, and with the loss scaler of fp16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.callback import Callback
from framework.distributed import World
from framework.errors import NonFiniteError
from framework.loop.update import LEFT_OUT, NON_FINITE, Skip, Update
from framework.recipe import StepOutput
from framework.trainer import Trainer
from tests.loop.ranks import in_ranks
from tests.loop.runs import Fit, by_step, core, crash_then_resume, events, fit, make, skipped

CPU = torch.device("cpu")


def with_gradient(*values: float, loss: float = 1.0, clip: float | None = None, gated: bool = True) -> Any:
    """An update of two parameters whose gradients are given, and what tells whether it happened."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in values]
    halves = {"a": parameters[:1], "b": parameters[1:]}
    optimizers = {name: torch.optim.SGD(half, lr=1.0, momentum=0.9) for name, half in halves.items() if half}
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor([value])
    update = Update(optimizers, CPU, clip, None)
    update.is_gated = gated
    result = update.apply(7, StepOutput(torch.tensor(loss)), None)
    states = [state for optimizer in optimizers.values() for state in optimizer.state.values()]
    return result, [parameter.item() for parameter in parameters], states, parameters


def test_the_norm_is_clipped_once_over_all_parameters_of_all_optimizers() -> None:
    _, values, _, _ = with_gradient(3.0, 4.0, clip=1.0)
    assert values == pytest.approx([1 - 0.6, 1 - 0.8], abs=1e-5)
    _, values, _, _ = with_gradient(0.3, 0.4, clip=1.0)
    assert values == pytest.approx([1 - 0.3, 1 - 0.4])


def test_clipping_sees_the_whole_gradient_of_the_step_not_that_of_a_micro_batch(tmp_path: Path) -> None:
    for micro in (8, 2):
        fit(tmp_path / str(micro), Fit(model=lambda: nn.Linear(4, 1)), {}, micro_batch_size=micro, clip_norm=0.3)
    one, many = by_step(tmp_path / "8"), by_step(tmp_path / "2")
    assert list(one.values()) == pytest.approx(list(many.values()), rel=1e-5)


def test_gradients_are_seen_before_they_are_clipped(tmp_path: Path) -> None:
    norms: list[float] = []

    class Look(Callback):
        def grads_ready(self, trainer: Trainer) -> None:
            gradients = [p.grad for p in trainer.built.model.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    fit(tmp_path, Fit(), {"look": Look()}, clip_norm=1e-4, max_steps=3)
    assert len(norms) == 3 and min(norms) > 1e-3


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(loss: float) -> None:
    result, values, states, parameters = with_gradient(1.0, 2.0, loss=loss)
    assert result == [Skip(7, NON_FINITE)] and values == [1.0, 1.0] and states == []
    assert [parameter.grad for parameter in parameters] == [None, None]


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(gradient: float) -> None:
    result, values, states, _ = with_gradient(1.0, gradient, clip=1.0)
    assert result == [Skip(7, NON_FINITE)] and values == [1.0, 1.0] and states == []


def test_without_the_gate_the_update_happens() -> None:
    result, values, _, _ = with_gradient(1.0, 2.0, loss=math.nan, gated=False)
    assert result == [] and values == [0.0, -1.0]


def test_a_step_that_is_left_out_changes_nothing_and_says_why() -> None:
    parameter = nn.Parameter(torch.ones(1))
    update = Update({"main": torch.optim.SGD([parameter], lr=1.0)}, CPU, None, None)
    update.left_out.add(2)
    for step, expected in ((1, []), (2, [Skip(2, LEFT_OUT)]), (3, [])):
        parameter.grad = torch.ones(1)
        assert update.apply(step, StepOutput(torch.tensor(1.0)), None) == expected
    assert parameter.item() == -1.0


def one_bad_rank(world: World, folder: str, clip: float | None) -> tuple[list[float], set[int], list[Tensor]]:
    """Both ranks train; the samples that only one of them sees make its loss infinite at some steps."""
    path = Path(folder)
    trainer = make(path, Fit(bad_ids=[5], bad=math.inf if clip is None else 1e38), core(policy="skip"), clip_norm=clip)
    trainer.fit()
    weights = [parameter.detach().clone() for parameter in trainer.built.model.parameters()]
    return [trainer.progress.step, trainer.progress.skipped], skipped(path), weights


@pytest.mark.parametrize("clip", [None, 1.0])
def test_one_bad_rank_leaves_the_step_out_on_all_ranks_alike(tmp_path: Path, clip: float | None) -> None:
    (progress, steps, weights), (other_progress, _, other_weights) = in_ranks(2, one_bad_rank, str(tmp_path), clip)
    assert progress == other_progress and progress[1] == len(steps) > 0
    assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(weights, other_weights, strict=True))


def test_an_overflow_of_the_scaler_counts_as_a_skipped_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, Fit(bad_ids=[5], bad=1e36), core(), precision="fp16", max_steps=16)
    assert trainer.fit() == 0
    assert trainer.progress.skipped == len(skipped(tmp_path)) > 0
    assert all(math.isfinite(loss) for loss in by_step(tmp_path).values())
    scaler = trainer.built.parts.scaler
    assert scaler is not None and scaler.get_scale() < 65536


def test_the_state_of_the_scaler_goes_on_after_a_resume(tmp_path: Path) -> None:
    def recipe() -> Fit:
        return Fit(bad_ids=[5], bad=1e36)

    whole = fit(tmp_path / "whole", recipe(), precision="fp16", max_steps=16)
    resumed = crash_then_resume(tmp_path / "cut", 14, recipe, precision="fp16", max_steps=16)
    assert whole.built.parts.scaler is not None and resumed.built.parts.scaler is not None
    assert whole.built.parts.scaler.state_dict() == resumed.built.parts.scaler.state_dict()
    assert by_step(tmp_path / "whole") == by_step(tmp_path / "cut")
    assert whole.progress == resumed.progress
    first = [int(event["step"]) for event in events(tmp_path / "cut", "restored")]
    assert first == [12]


def test_fifty_overflows_in_a_row_are_a_failure_that_says_what_to_do(tmp_path: Path) -> None:
    trainer = make(tmp_path, Fit(bad_ids=range(64), bad=1e37), {}, precision="fp16", max_steps=80)
    with pytest.raises(NonFiniteError, match=r"50 steps in a row up to step 50; .*bf16 or a lower learning rate"):
        trainer.fit()


def test_fp16_trains_like_fp32_as_long_as_nothing_overflows(tmp_path: Path) -> None:
    for precision in ("fp32", "fp16"):
        recipe = Fit(model=lambda: nn.Linear(4, 1), bad_ids=range(64), bad=0.01)  # small enough for the first scale
        fit(tmp_path / precision, recipe, {}, precision=precision, clip_norm=0.005)
        assert skipped(tmp_path / precision) == set()
    full, half = (list(by_step(tmp_path / precision).values()) for precision in ("fp32", "fp16"))
    assert half == pytest.approx(full, rel=2e-2) and half != full
