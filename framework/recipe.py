"""Recipe: what a user subclasses to say what is trained.

Guarantee: a recipe that overrides nothing but `train_step` trains; every other method has a default that uses the
factories given in the config. A recipe holds no progress: the trainer owns that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from framework.errors import ConfigError
from framework.schedules import Horizon

Batch = Any
Factory = Callable[..., Any]


@dataclass(slots=True)
class StepOutput:
    """What `train_step` computes from one micro-batch.

    Args:
        loss: Scalar `[]`, differentiable. Without a weight a mean over the micro-batch; with a weight a sum.
        weight: What the sum is a sum of (samples, tokens), scalar `[]` or a number: gradients are scaled once by the
            sum of the weights over the whole global batch.
        metrics: Scalars `[]` (or plain numbers) to log for this step; detached, never waited for.
    """

    loss: Tensor
    weight: Tensor | float | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Recipe:
    """What to train. Everything has a default that uses the factories given in the config.

    Args:
        model: Factory `() -> nn.Module`.
        optimizer: Factory `(parameters) -> Optimizer`, or a mapping of names to such factories.
        schedule: Factory `(horizon) -> factor of a step`, or a `torch.optim.lr_scheduler` factory `(optimizer) -> scheduler`:
            one of its classes, or a function whose first argument is called `optimizer`.
        train_data: Factory `() -> Dataset`.
        eval_data: Factory `() -> Dataset`, a mapping of names to such factories, or none.
        collate: Turns a list of samples into a batch; default torch's.
        sampler: Factory `(dataset) -> Sampler` of the order of the training samples; default the run's own order.

    Attributes:
        metrics: What `build_metrics` gave, on the device, reset before each evaluation; update them in `eval_step`.
        device: Where the run computes, set by the trainer before anything is built.
        generators: Further generators whose state belongs to the run, by name: `torch.Generator`,
            `numpy.random.Generator` or `random.Random`. They are saved and restored per rank.
    """

    device: torch.device = torch.device("cpu")

    def __init__(
        self,
        *,
        model: Factory | None = None,
        optimizer: Factory | Mapping[str, Factory] | None = None,
        schedule: Factory | None = None,
        train_data: Factory | None = None,
        eval_data: Factory | Mapping[str, Factory] | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        sampler: Factory | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._train_data = train_data
        self._eval_data = eval_data
        self._collate = collate
        self._sampler = sampler
        self._factor: Callable[[int], float] | None = None
        self.metrics: dict[str, Any] = {}
        self.generators: dict[str, Any] = {}

    def build_model(self) -> nn.Module:
        """The model, on any device."""
        return self._needed(self._model, "model")()  # type: ignore[no-any-return]

    def build_optimizer(self, model: nn.Module) -> Optimizer | dict[str, Optimizer]:
        """The optimizer, or several under names; all step once per step.

        Args:
            model: The model on its device, not wrapped. Every parameter that is trained must be one of it.
        """
        factory = self._needed(self._optimizer, "optimizer")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if isinstance(factory, Mapping):
            return {name: one(self.parameters_of(name, model)) for name, one in factory.items()}
        return factory(trained)  # type: ignore[no-any-return]

    def parameters_of(self, name: str, model: nn.Module) -> Iterable[nn.Parameter]:
        """The parameters that the optimizer called `name` trains, where there are several optimizers.

        The default gives each optimizer the submodule of its own name.

        Raises:
            ConfigError: There is no such submodule.
        """
        part = dict(model.named_children()).get(name)
        if part is None:
            known = ", ".join(child for child, _ in model.named_children())
            raise ConfigError(
                f"optimizer.{name}: the model has no part of that name (it has {known}). Name the optimizers after parts "
                f"of the model, or override Recipe.parameters_of."
            )
        return [parameter for parameter in part.parameters() if parameter.requires_grad]

    def build_train_data(self) -> Dataset[Any]:
        """The training samples."""
        return self._needed(self._train_data, "data.train")()  # type: ignore[no-any-return]

    def build_eval_data(self) -> Dataset[Any] | dict[str, Dataset[Any]] | None:
        """The evaluation samples, several sets under names, or none."""
        if self._eval_data is None:
            return None
        if isinstance(self._eval_data, Mapping):
            return {name: factory() for name, factory in self._eval_data.items()}
        return self._eval_data()  # type: ignore[no-any-return]

    def build_sampler(self, dataset: Dataset[Any]) -> Iterable[int] | None:
        """The order of the training samples, or none for the run's own, which is shuffled anew in each epoch.

        Any sampler will do; each epoch it is told its number by `set_epoch`, if it has that, and draws from generators
        that hang on the seed and the epoch alone. A `DistributedSampler` is used as this rank's share, any other one is
        divided over the ranks.

        Args:
            dataset: What `build_train_data` gave.
        """
        return self._sampler(dataset) if self._sampler is not None else None

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput | Tensor:
        """The loss of one micro-batch.

        Call `model(...)` once per micro-batch; under several ranks it averages the gradients. After a resume on several
        ranks it is called twice more on one batch before the first step, and the results are thrown away.

        Args:
            model: The model, possibly wrapped.
            batch: What `collate` made, on the device.
        """
        raise NotImplementedError(f"{type(self).__name__} must override train_step(model, batch)")

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Values per sample, each `[batch]`; the trainer averages them over all samples.

        The names must be the same for every batch. Empty only where `build_metrics` gives something.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has evaluation data and must override eval_step(model, batch)"
        )

    def build_metrics(self) -> dict[str, Any]:
        """`torchmetrics.Metric` objects by name, for what is no mean over samples."""
        return {}

    def collate(self, samples: list[Any]) -> Batch:
        """One batch from a list of samples, in a loader process."""
        return (self._collate or default_collate)(samples)

    @property
    def collate_in_workers(self) -> Callable[[list[Any]], Batch] | None:
        """What loader processes call: the method only where it is overridden, since it takes the whole recipe along."""
        return self.collate if type(self).collate is not Recipe.collate else self._collate

    def lr_factor(self, step: int, total_steps: int | None) -> float:
        """What the learning rate of step `step` (from 0) is multiplied with, finite and at least 0. Pure; default the schedule."""
        return self._factor(step) if self._factor is not None else 1.0

    def set_horizon(self, horizon: Horizon) -> None:
        """Tells the schedule how long the run is. Called by the trainer before the first step."""
        if self._schedule is not None:
            self._factor = self._schedule(horizon)

    @property
    def has_eval_data(self) -> bool:
        """Whether there is a factory of evaluation data, or a method of the recipe's own."""
        return self._eval_data is not None or type(self).build_eval_data is not Recipe.build_eval_data

    @property
    def schedule(self) -> Factory | None:
        """The schedule's factory."""
        return self._schedule

    def _needed(self, factory: Any, key: str) -> Any:
        if factory is None:
            raise ConfigError(
                f"{type(self).__name__} was given no {key}. Set {key}._target_, or override the method that builds it."
            )
        return factory
