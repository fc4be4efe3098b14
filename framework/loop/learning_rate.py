"""The learning rate of each step.

Guarantee: with a schedule that is a function, the rate of a step depends on the step alone, whatever happened before;
a scheduler of `torch.optim.lr_scheduler` is stepped exactly once per optimizer step and its state is in the checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from framework.errors import ConfigError
from framework.recipe import Recipe
from framework.schedules import Horizon


class LearningRate:
    """Sets the learning rate of all groups of all optimizers.

    Args:
        recipe: Its `lr_factor` or its schedule says what the rate is.
        optimizers: By name.
        horizon: How long the run is.

    Attributes:
        schedulers: Schedulers of torch by optimizer name; empty where the rate is a function of the step.
    """

    def __init__(self, recipe: Recipe, optimizers: Mapping[str, Optimizer], horizon: Horizon) -> None:
        self._recipe = recipe
        self._total_steps = horizon.total_steps
        self._groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        self._bases = [(group, float(group["lr"])) for group in self._groups]
        self.schedulers: dict[str, Any] = {}
        kind = _scheduler_maker(recipe.schedule)
        if kind is None:
            recipe.set_horizon(horizon)
        else:
            assert recipe.schedule is not None
            extra = _total_steps(kind, recipe.schedule, horizon)
            self.schedulers = {name: recipe.schedule(optimizer, **extra) for name, optimizer in optimizers.items()}

    @property
    def current(self) -> float:
        """The rate of the first group."""
        rate = self._groups[0]["lr"]
        return rate.item() if isinstance(rate, Tensor) else rate  # type: ignore[no-any-return]

    def prepare(self, step: int) -> None:
        """Sets the rate for the update that follows `step` completed ones.

        Raises:
            ConfigError: The schedule gave no number, or one that is negative or not finite.
        """
        if self.schedulers:
            return
        given: Any = self._recipe.lr_factor(step, self._total_steps)
        try:
            factor = float(given)
        except (TypeError, ValueError):
            factor = math.nan
        if not 0.0 <= factor < math.inf:
            raise ConfigError(
                f"{type(self._recipe).__name__}.lr_factor gave {given!r} for step {step}. It must give a finite number of "
                f"at least 0 for every step, which the learning rate is multiplied with: check the schedule."
            )
        for group, base in self._bases:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    def advance(self, step: int) -> None:
        """Called once after each update, with the number of completed steps."""
        if not self.schedulers:
            self.prepare(step)
            return
        for scheduler in self.schedulers.values():
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Shows evaluation results to schedulers that watch a plateau.

        Raises:
            ConfigError: There is no `eval/loss` to watch.
        """
        for scheduler in self.schedulers.values():
            if isinstance(scheduler, ReduceLROnPlateau):
                if "eval/loss" not in metrics:
                    raise ConfigError(
                        f"schedule: ReduceLROnPlateau watches eval/loss, and eval_step gave only {sorted(metrics)}. "
                        f"Return a `loss` per sample from eval_step."
                    )
                scheduler.step(metrics["eval/loss"])


def _scheduler_maker(factory: Any) -> Callable[..., Any] | None:
    """What makes a scheduler of torch out of an optimizer, if that is what the factory does.

    A class of torch's, or a function whose first argument is called `optimizer`.
    """
    target = factory
    while isinstance(target, functools.partial):
        target = target.func
    target = getattr(target, "target", target)
    if isinstance(target, type):
        return target if issubclass(target, LRScheduler) else None
    is_maker = target is not None and next(iter(inspect.signature(target).parameters), "") == "optimizer"
    return target if is_maker else None


def _total_steps(kind: Callable[..., Any], factory: Any, horizon: Horizon) -> dict[str, int]:
    """`total_steps` for a scheduler that takes it and was not given a length."""
    given = getattr(factory, "keywords", None) or getattr(factory, "kwargs", {})
    takes_it = "total_steps" in inspect.signature(kind).parameters
    if not takes_it or "total_steps" in given or "epochs" in given:
        return {}
    return {"total_steps": horizon.needed(getattr(kind, "__name__", str(kind)))}
