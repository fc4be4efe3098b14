"""Forward and backward over the micro-batches of one step.

Guarantee: the gradient is that of one global batch, however it is cut into ranks and micro-batches: means are averaged
over equal micro-batches, sums are divided once by the sum of the weights over all ranks. The loss handed on is the
global one and is a detached tensor on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from framework.distributed import World
from framework.errors import ConfigError
from framework.recipe import Recipe, StepOutput

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Window:
    """Runs the micro-batches of a step through the recipe.

    Args:
        recipe: What to train.
        model: The model, wrapped for several ranks if there are several.
        world: This process among all.
        accumulation: Micro-batches per step and rank.
        precision: `fp32`, `bf16` or `fp16`.
        scaler: The loss scaler, for fp16.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        world: World,
        accumulation: int,
        precision: str,
        scaler: GradScaler | None,
    ) -> None:
        self._recipe = recipe
        self._model = model
        self._world = world
        self._accumulation = accumulation
        self._dtype = PRECISIONS[precision]
        self._scaler = scaler
        self._ddp = model if isinstance(model, DistributedDataParallel) else None

    @property
    def device(self) -> torch.device:
        """Where the forward runs."""
        return self._world.device

    def autocast(self) -> Any:
        """The context in which the recipe's forward runs."""
        return nullcontext() if self._dtype is None else torch.autocast(self._world.device.type, self._dtype)

    def run(self, batches: Sequence[Any]) -> StepOutput:
        """Leaves gradients in the parameters; returns the global loss and this rank's mean metrics, detached.

        If the recipe gave weights, gradients are those of the sum, divided by the number of ranks; `weight` of the
        result is what they must be divided by to be those of the mean.
        """
        if len(batches) == 1:
            return self._alone(self._micro_step(batches[0]))
        outputs = []
        last = len(batches) - 1
        for index, batch in enumerate(batches):
            if index < last and self._ddp is not None:
                with self._ddp.no_sync():
                    outputs.append(self._micro_step(batch))
            else:
                outputs.append(self._micro_step(batch))
        return self._total(outputs)

    def _micro_step(self, batch: Any) -> StepOutput:
        if self._dtype is None:
            output = self._recipe.train_step(self._model, batch)
        else:
            with self.autocast():
                output = self._recipe.train_step(self._model, batch)
        if isinstance(output, Tensor):
            output = StepOutput(output)
        elif isinstance(output, StepOutput):  # a recipe may hand out the same object again
            output = StepOutput(output.loss, output.weight, output.metrics)
        else:
            raise ConfigError(
                f"{type(self._recipe).__name__}.train_step returned {type(output).__name__}. Return the loss as a scalar "
                f"tensor, or a framework.StepOutput."
            )
        loss = output.loss
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad or loss.is_complex():
            raise ConfigError(f"{type(self._recipe).__name__}.train_step returned {_bad_loss(loss)}")
        if output.weight is not None:
            self._check_weight(output.weight)
        output.metrics = self._scalars(output.metrics, loss) if output.metrics else {}
        if self._accumulation > 1 and output.weight is None:
            loss = loss / self._accumulation
        if self._scaler is not None:
            torch.autograd.backward(self._scaler.scale(loss))
        else:
            torch.autograd.backward(loss)
        output.loss = loss.detach()
        return output

    def _check_weight(self, weight: Any) -> None:
        """A sign is looked at only where that waits for no device."""
        if isinstance(weight, Tensor):
            is_good = not weight.dim() and not weight.is_complex() and not (weight.is_cpu and bool(weight < 0))
        else:
            is_good = isinstance(weight, int | float) and not weight < 0
        if not is_good:
            raise ConfigError(
                f"{type(self._recipe).__name__}.train_step returned the weight {_shown(weight)}. It must be a number, or a "
                f"scalar tensor, of at least 0: how many samples or tokens the loss is the sum of."
            )

    def _scalars(self, metrics: Any, loss: Tensor) -> dict[str, Tensor]:
        """Metrics as detached scalars of a floating type."""
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{type(self._recipe).__name__}.train_step returned {type(metrics).__name__} as metrics. Return a dict of "
                f"names to scalars."
            )
        scalars = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor) and not value.dim() and not value.is_complex():
                scalars[name] = value.detach() if value.is_floating_point() else value.detach().double()
            elif isinstance(value, int | float):
                scalars[name] = torch.full((), float(value), dtype=torch.float64, device=loss.device)
            else:
                raise ConfigError(
                    f"{type(self._recipe).__name__}.train_step returned the metric '{name}' as {_shown(value)}. A metric is "
                    f"a scalar tensor or a number: reduce it, for example with .mean()."
                )
        return scalars

    def _alone(self, output: StepOutput) -> StepOutput:
        """The step of a single micro-batch."""
        if output.weight is None and self._world.size == 1:
            return output
        return self._over_ranks(output.loss, output.weight, output.metrics)

    def _total(self, outputs: list[StepOutput]) -> StepOutput:
        weighted = [output for output in outputs if output.weight is not None]
        if weighted and len(weighted) != len(outputs):
            raise ConfigError(
                f"{type(self._recipe).__name__}.train_step gave a weight for some micro-batches and none for others."
            )
        names = outputs[0].metrics.keys()
        other = next((output.metrics.keys() for output in outputs if output.metrics.keys() != names), None)
        if other is not None:
            raise ConfigError(
                f"{type(self._recipe).__name__}.train_step gave the metrics {sorted(names)} for one micro-batch and "
                f"{sorted(other)} for another of the same step. Return the same names each time."
            )
        loss = torch.stack([output.loss for output in outputs]).sum()
        weight = (
            sum((_tensor(output.weight, loss) for output in weighted), torch.zeros_like(loss)) if weighted else None
        )
        metrics = {name: torch.stack([output.metrics[name] for output in outputs]).mean(0) for name in names}
        return self._over_ranks(loss, weight, metrics)

    def _over_ranks(self, loss: Tensor, weight: Tensor | float | None, metrics: dict[str, Tensor]) -> StepOutput:
        if self._world.size == 1:
            if weight is None:
                return StepOutput(loss, None, metrics)
            total = _tensor(weight, loss)
            return StepOutput(loss / total, total, metrics)
        sums = torch.stack([loss.double(), _tensor(1.0 if weight is None else weight, loss).double()])
        dist.all_reduce(sums)
        mean = (sums[0] / sums[1]).to(loss.dtype)
        # DDP averaged the gradients of sums over ranks, hence the factor
        return StepOutput(mean, None if weight is None else (sums[1] / self._world.size).to(loss.dtype), metrics)


def _shown(value: Any) -> str:
    """A value in an error message: numbers as they are, tensors by shape and type."""
    if isinstance(value, Tensor) and (value.dim() or value.is_complex() or not value.is_cpu):
        return f"a tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)[:100]


def _bad_loss(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return f"{type(loss).__name__} as loss. Return a scalar tensor that depends on the weights."
    if loss.is_complex():
        return f"a complex loss ({loss.dtype}). Return a real scalar, for example its .abs() or .real."
    return (
        f"a loss of shape {list(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}. "
        f"Return a scalar that depends on the weights."
    )


def _tensor(value: Tensor | float | None, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).detach()
