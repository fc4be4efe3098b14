"""The gradient is that of one global batch, however it is cut into micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from framework.distributed import World
from framework.errors import ConfigError
from framework.loop.update import Update
from framework.loop.window import Window
from framework.recipe import Recipe, StepOutput
from tests.loop.ranks import in_ranks

SOLO = World(0, 1, 0, 1, torch.device("cpu"))
Batch = tuple[Tensor, Tensor]


class Mean(Recipe):
    """The loss of a batch is a mean over its samples."""

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput | Tensor:
        x, y = batch
        return StepOutput(nn.functional.mse_loss(model(x), y), metrics={"largest": y.max()})


class Bare(Recipe):
    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput | Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class Sum(Recipe):
    """The loss is a sum over tokens; a token counts where `y` is not 0."""

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        counts = (y != 0).float()
        return StepOutput((((model(x) - y) ** 2) * counts).sum(), weight=counts.sum())


class Mixed(Sum):
    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        output = super().train_step(model, batch)
        return output if (batch[1] > 0).all() else StepOutput(output.loss)


def whole_numbers(samples: int = 16) -> Batch:
    """Small integers: every sum of products of them is exact in float32, in any order."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (samples, 4), generator=generator).float()
    return x, torch.randint(-4, 5, (samples, 1), generator=generator).float()


def real_numbers(samples: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(samples, 1, generator=generator)
    y[torch.tensor([1, 2, 3, 4, 5, 11])] = 0.0  # uneven over micro-batches and ranks
    return torch.randn(samples, 4, generator=generator), y


def linear() -> nn.Linear:
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0, 1.0]]))
        model.bias.fill_(1.0)
    return model


def cut(batch: Batch, parts: int, rank: int = 0, size: int = 1) -> list[Batch]:
    """The micro-batches of a rank: it takes every `size`-th sample."""
    x, y = (value[rank::size] for value in batch)
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


def step(
    recipe: Recipe, batch: Batch, parts: int, world: World = SOLO
) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Global loss, metrics and the gradients that the optimizer would see."""
    model = linear()
    wrapped = DistributedDataParallel(model) if world.size > 1 else model
    window = Window(recipe, wrapped, world, parts, "fp32", None)
    update = Update({"main": torch.optim.SGD(model.parameters(), lr=0.0)}, world.device, None, None)
    output = window.run(cut(batch, parts, world.rank, world.size))
    seen: list[Tensor] = []

    def look() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())

    update.apply(1, output, look)
    return output.loss, output.metrics, seen


def plain(recipe: Recipe, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The loop that everybody writes, over the whole batch at once."""
    model = linear()
    output: Any = recipe.train_step(model, batch)
    loss = output.loss if output.weight is None else output.loss / output.weight
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return loss.detach(), [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16])
def test_the_gradient_does_not_depend_on_accumulation(parts: int) -> None:
    for batch, exact in ((whole_numbers(), True), (real_numbers(), False)):
        loss, gradients = plain(Mean(), batch)
        ours, _, seen = step(Mean(), batch, parts)
        for left, right in zip([ours, *seen], [loss, *gradients], strict=True):
            if exact:
                assert torch.equal(left, right)
            else:
                torch.testing.assert_close(left, right)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_sums_with_uneven_weights_equal_the_plain_loop(parts: int) -> None:
    loss, gradients = plain(Sum(), real_numbers())
    ours, _, seen = step(Sum(), real_numbers(), parts)
    weights = {int((y != 0).sum()) for _, y in cut(real_numbers(), 4)}
    assert len(weights) > 1  # a mean of means would differ
    torch.testing.assert_close([ours, *seen], [loss, *gradients])


def over_ranks(world: World, parts: int) -> list[tuple[Tensor, list[Tensor]]]:
    cases = ((Mean(), whole_numbers()), (Mean(), real_numbers()), (Sum(), real_numbers()))
    return [step(recipe, batch, parts, world)[::2] for recipe, batch in cases]


@pytest.mark.parametrize("parts", [1, 4])
def test_the_gradient_does_not_depend_on_ranks(parts: int) -> None:
    first, second = in_ranks(2, over_ranks, parts)
    cases = ((Mean(), whole_numbers()), (Mean(), real_numbers()), (Sum(), real_numbers()))
    for number, (recipe, batch) in enumerate(cases):
        loss, gradients = plain(recipe, batch)
        for ours, seen in (first[number], second[number]):
            torch.testing.assert_close([ours, *seen], [loss, *gradients])
        assert all(torch.equal(a, b) for a, b in zip(first[number][1], second[number][1], strict=True))
    exact = plain(*cases[0])[1]
    assert all(torch.equal(a, b) for a, b in zip(first[0][1], exact, strict=True))


def test_a_bare_loss_is_a_mean() -> None:
    for ours, theirs in zip(step(Bare(), real_numbers(), 2)[2], step(Mean(), real_numbers(), 2)[2], strict=True):
        assert torch.equal(ours, theirs)


def test_a_mix_of_weights_and_none_is_refused() -> None:
    x, y = whole_numbers(4)
    y = torch.tensor([[1.0], [2.0], [-1.0], [2.0]])
    with pytest.raises(
        ConfigError, match=r"Mixed\.train_step gave a weight for some micro-batches and none for others"
    ):
        step(Mixed(), (x, y), 2)


@pytest.mark.parametrize("recipe", [Mean(), Sum()])
def test_what_is_handed_on_holds_no_graph(recipe: Recipe) -> None:
    for parts in (1, 2):
        loss, metrics, _ = step(recipe, real_numbers(), parts)
        assert loss.shape == () and loss.grad_fn is None and not loss.requires_grad
        assert all(value.grad_fn is None for value in metrics.values())


def test_metrics_are_averaged_over_micro_batches() -> None:
    x, y = whole_numbers(4)
    y = torch.tensor([[1.0], [2.0], [5.0], [4.0]])
    assert step(Mean(), (x, y), 2)[1]["largest"] == 3.5


def test_bf16_computes_the_forward_in_bf16_and_keeps_weights_in_float32() -> None:
    seen: list[torch.dtype] = []

    class Look(Mean):
        def train_step(self, model: nn.Module, batch: Batch) -> StepOutput | Tensor:
            seen.append(model(batch[0]).dtype)
            return super().train_step(model, batch)

    model = linear()
    Window(Look(), model, SOLO, 1, "bf16", None).run([whole_numbers()])
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == torch.float32 and model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
