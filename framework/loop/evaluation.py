"""Evaluation: values per sample, averaged over all samples of all ranks.

Guarantee: an evaluation changes nothing that training reads: generators, `training` flags, weights and buffers are as
before, also when it raises. Every sample counts once, whatever the number of ranks and the batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.data.fetch import to_device
from framework.data.loader import EvalLoader
from framework.data.position import Token, window_tokens
from framework.data.seeding import forked
from framework.distributed import World
from framework.errors import ConfigError
from framework.loop import streams
from framework.loop.control import Requests
from framework.loop.ema import EMA
from framework.loop.meter import EVALUATION, PRODUCTIVE
from framework.progress import Progress
from framework.recipe import Recipe

if TYPE_CHECKING:
    from framework.trainer import Trainer

log = logging.getLogger(__name__)


class Interrupted(Exception):
    """The run was asked to stop in the middle of an evaluation; it is made up for when the run goes on."""


class Evaluation:
    """Evaluates the bare model on every evaluation set.

    Args:
        recipe: Its `eval_step` and `build_metrics` say what is computed.
        model: The bare model.
        world: This process among all.
        loaders: Evaluation sets by name; a single unnamed one has the empty name.
        autocast: Gives the context in which the forward runs.
        ema: Weights to evaluate instead of the live ones, if any.
        channels_last: Memory format of 4-dimensional inputs.
        leaves_out: Whether samples that cannot be loaded are left out of their batches.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, world: World, loaders: Mapping[str, EvalLoader],
        autocast: Callable[[], Any], ema: EMA | None, channels_last: bool, leaves_out: bool = False,
    ) -> None:  # fmt: skip
        self._leaves_out = leaves_out
        self._recipe = recipe
        self._model = model
        self._world = world
        self._loaders = loaders
        self._autocast = autocast
        self._ema = ema
        self._channels_last = channels_last
        self._is_built = False

    def run(self, seed: int, should_stop: Callable[[], bool]) -> dict[str, float]:
        """Metrics over all samples and ranks.

        Args:
            seed: Seeds the generators for the length of the evaluation.
            should_stop: Asked before each batch whether to break off.

        Returns:
            `eval/<name>`, or `eval/<set>/<name>` where there are several sets.

        Raises:
            ConfigError: `eval_step` gave something else than values per sample.
            Interrupted: Some rank was asked to stop.
        """
        self._build_metrics()
        results: dict[str, float] = {}
        self._share_buffers()
        with forked(seed), _evaluating(self._model), torch.no_grad(), self._weights():
            for name, loader in self._loaders.items():
                prefix = f"eval/{name}/" if name else "eval/"
                for key, value in self._one_set(name, loader, should_stop).items():
                    results[prefix + key] = value
        return results

    def close(self) -> None:
        for loader in self._loaders.values():
            loader.close()

    def _build_metrics(self) -> None:
        if not self._is_built:  # here, not at the start: importing torchmetrics takes seconds
            self._recipe.metrics = {
                name: metric.to(self._world.device) for name, metric in self._recipe.build_metrics().items()
            }
            self._is_built = True
        for metric in self._recipe.metrics.values():
            metric.reset()

    def _share_buffers(self) -> None:
        """Buffers of replicas are rank 0's."""
        if self._world.size > 1:
            for buffer in self._model.buffers():
                dist.broadcast(buffer, src=0)

    def _weights(self) -> Any:
        return nullcontext() if self._ema is None else self._ema.swapped_in()

    def _one_set(self, set_name: str, loader: EvalLoader, should_stop: Callable[[], bool]) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        count = 0
        interrupted = False
        for batch, token in zip(loader, self._tokens(loader), strict=False):
            if should_stop():
                interrupted = True
                break
            with self._autocast():
                values = self._recipe.eval_step(self._model, to_device(batch, self._world.device, self._channels_last))
            samples = _samples(values, token.count) if self._leaves_out else token.count
            self._check(values, samples, set_name)
            if count and values.keys() != sums.keys():
                raise self._other_names(set_name, sums, values)
            for name, value in values.items():
                total = value.double().sum()
                sums[name] = sums[name] + total if name in sums else total
            count += samples
        self._break_off_together(interrupted)
        means = {name: float(value) for name, value in self._reduced(set_name, sums, count).items()}
        for name, metric in self._recipe.metrics.items():
            means[name] = float(metric.compute())
            metric.reset()
        return means

    def _tokens(self, loader: EvalLoader) -> list[Token]:
        """Which samples each batch of this rank has."""
        return window_tokens(0, loader.samples, loader.batch_size or 1, self._world.rank, self._world.size)

    def _check(self, values: Any, samples: int, set_name: str) -> None:
        """Whether these are values per sample; anything else would make a wrong mean without a word."""
        if not isinstance(values, Mapping) or (not values and not self._recipe.metrics):
            what = "an empty dict, and build_metrics gives nothing either" if values == {} else type(values).__name__
            raise ConfigError(
                f"{self._where(set_name)} returned {what}. Return a dict of names to tensors [{samples}]."
            )
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.dim() != 1 or len(value) != samples or value.is_complex():
                got = (
                    f"a tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
                    if isinstance(value, Tensor)
                    else f"{type(value).__name__}"
                )
                raise ConfigError(
                    f"{self._where(set_name)} returned '{name}' as {got}; it must be a real tensor [{samples}], one value "
                    f"for each of the {samples} samples of the batch. What is no mean over samples goes to build_metrics."
                )

    def _where(self, set_name: str) -> str:
        return f"{type(self._recipe).__name__}.eval_step{f' on data.eval.{set_name}' if set_name else ''}"

    def _other_names(self, set_name: str, one: Iterable[str], other: Iterable[str]) -> ConfigError:
        return ConfigError(
            f"{self._where(set_name)} returned {sorted(one)} for one batch and {sorted(other)} for another. Return the same "
            f"names for every batch: each is averaged over all samples."
        )

    def _break_off_together(self, interrupted: bool) -> None:
        flag = torch.tensor([float(interrupted)], device=self._world.device)
        if self._world.size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if bool(flag.item()):
            raise Interrupted

    def _reduced(self, set_name: str, sums: dict[str, Tensor], count: int) -> dict[str, Tensor]:
        if self._world.size > 1:
            everyone: list[Any] = [None] * self._world.size
            dist.all_gather_object(everyone, ({name: float(value) for name, value in sums.items()}, count))
            count = sum(number for _, number in everyone)
            names = dict.fromkeys(name for part, _ in everyone for name in part)
            parts = [part for part, number in everyone if number]  # a rank without samples names nothing
            for part in parts:
                if part.keys() != parts[0].keys():
                    raise self._other_names(set_name, parts[0], part)
            sums = {
                name: torch.tensor(sum(part.get(name, 0.0) for part, _ in everyone), dtype=torch.float64)
                for name in names
            }
        return {name: total / max(1, count) for name, total in sums.items()}


def _samples(values: Any, most: int) -> int:
    """How many samples there are values of, where those that cannot be loaded are left out of a batch."""
    first = next(iter(values.values()), None) if isinstance(values, Mapping) else None
    return min(len(first), most) if isinstance(first, Tensor) and first.dim() == 1 else most


def evaluate_if_due(trainer: Trainer, before: Progress, requests: Requests | None) -> None:
    """Evaluates at the safe point of a step, if the step ends an interval or the run, or somebody asked for it."""
    evaluation, built = trainer.built.evaluation, trainer.built
    if evaluation is None:
        return
    after = trainer.progress
    due = trainer.eval_every is not None and trainer.eval_every.is_due(before, after, built.num_samples)
    at_end = trainer.settings.eval_at_end and after.step == trainer.total_steps
    if not (due or at_end or (requests is not None and requests.eval)):
        return
    trainer.pending_evaluation = True
    if not trainer.stop.exit_code:  # a signal leaves no time for it now; the next attempt makes up for it
        evaluate(trainer, evaluation)


def evaluate(trainer: Trainer, evaluation: Evaluation) -> None:
    """Evaluates at the safe point of a step, and tells everybody.

    If the run is asked to stop meanwhile, the evaluation stays pending: it is in the checkpoint, and the next attempt
    makes up for it.
    """
    step = trainer.progress.step
    trainer.meter.lap(PRODUCTIVE)
    trainer.pending_evaluation = True
    trainer.fence()  # an average of the weights is swapped in
    trainer.events.fire("eval_start", trainer)
    try:
        seed = streams.derive(trainer.seed, streams.EVAL, step)
        metrics = evaluation.run(seed, lambda: trainer.control.is_in_a_hurry)
    except Interrupted:
        log.info("evaluation at step %d was broken off to stop; it will be made up for", step)
        # here and now: after another step it would not be the evaluation of this one
        trainer.stop = trainer.control.agreed_now(step)
        return
    finally:
        trainer.meter.lap(EVALUATION)
    trainer.pending_evaluation = False
    trainer.last_metrics = metrics
    trainer.built.learning_rate.evaluated(metrics)
    trainer.record("metrics", step=step, values=metrics)
    trainer.events.fire("eval_end", trainer, metrics)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every submodule in evaluation mode; afterwards each has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
