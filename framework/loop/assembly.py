"""Everything a run consists of, built from recipe and settings before anything is created on disk.

Guarantee: building draws from generators seeded by the run's seed alone, the same on all ranks; afterwards each rank
has streams of its own.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from framework.data import DataLoader, EvalLoader, position
from framework.data.device import to_device
from framework.data.position import Token
from framework.data.seeding import kept
from framework.data.streams.loader import StreamLoader
from framework.distributed import World
from framework.duration import Duration
from framework.errors import ConfigError, DataError
from framework.loop import loading, streams
from framework.loop.ema import EMA
from framework.loop.evaluation import Evaluation
from framework.loop.learning_rate import LearningRate
from framework.loop.state import Parts
from framework.loop.update import Update
from framework.loop.window import PRECISIONS, Window
from framework.progress import Progress
from framework.recipe import Recipe, StepOutput
from framework.schedules import Horizon
from framework.settings import LoaderSettings, TrainerSettings

log = logging.getLogger(__name__)

MAX_THREADS = 1024


@dataclass
class Assembly:
    """The built objects of a run.

    Args:
        data: The training data, and how its place is kept.
        total_steps: Steps in all, or none where only a time bounds the run.
        model: The bare model on its device.
        wrapped: What `train_step` gets.
        optimizers: By name.
        loader: Micro-batches, step after step.
        micro_batch_size: Samples per forward pass and rank.
        accumulation: Micro-batches per step and rank.
        window: Forward and backward.
        update: Gradients to weights.
        learning_rate: The rate of each step.
        evaluation: Or none, without evaluation data.
        parts: What a checkpoint holds.
        deterministic: Whether kernels are deterministic.
        channels_last: Memory format of 4-dimensional inputs.
    """

    data: loading.TrainData
    total_steps: int | None
    model: nn.Module
    wrapped: nn.Module
    optimizers: dict[str, Optimizer]
    loader: DataLoader | StreamLoader
    micro_batch_size: int
    accumulation: int
    window: Window
    update: Update
    learning_rate: LearningRate
    evaluation: Evaluation | None
    parts: Parts
    deterministic: bool
    channels_last: bool

    @property
    def num_samples(self) -> int:
        """Samples per epoch; `ENDLESS` where nobody knows."""
        return self.data.samples

    @property
    def strategy(self) -> str:
        """How the place in the data is kept."""
        return self.data.strategy

    @property
    def fingerprint(self) -> str | None:
        """What identifies the training data, if the dataset can say."""
        return getattr(self.loader.dataset, "fingerprint", None)

    def compute(self, step: int, batches: list[Any]) -> StepOutput:
        """Forward and backward of one step; one that is left out leaves buffers, too, as they were."""
        if step not in self.update.left_out:
            return self.window.run(batches)
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        output = self.window.run(batches)
        for buffer, before in kept:
            buffer.copy_(before)
        return output

    def warm_up(self) -> None:
        """Two throw-away passes under DDP, whose reducer orders its buckets anew after its first pass.

        Sums over ranks depend on that order: without this a resumed run would differ from its first step on. Weights,
        buffers and generators must be restored after it.
        """
        if not isinstance(self.wrapped, DistributedDataParallel):
            return
        loader = self.loader
        if isinstance(loader, StreamLoader):
            batch = loader.first_batch()
        else:
            with kept():
                batch, _ = loader.fetch(Token(0, 1, min(self.micro_batch_size, self.num_samples)))
        batch = to_device(batch, self.window.device, self.channels_last)
        for _ in range(2):
            self.window.run([batch])
            self.wrapped.zero_grad(set_to_none=True)


def build(
    recipe: Recipe, trainer: TrainerSettings, loader: LoaderSettings, seed: int, world: World, done: Progress,
    gather: Callable[[Any], list[Any]], adopt: Callable[[Any], None],
) -> Assembly:  # fmt: skip
    """Builds data, model, optimizers and what drives them.

    Args:
        recipe: What to train.
        trainer: How long and how.
        loader: How samples get to the model.
        seed: Of the run.
        world: This process among all.
        done: What the run has completed in earlier attempts: how many steps are left depends on it.
        gather: Gives every rank's value to every rank.
        adopt: Lets the training data take over what an earlier attempt keeps of them, before their length is asked for.

    Raises:
        ConfigError: Settings that do not fit together, with the numbers.
        DataError: No data, or too little.
    """
    deterministic = set_up_torch(trainer, world)
    _check_recipe(recipe)
    micro, accumulation = batch_shape(trainer, world)
    streams.start(streams.derive(seed, streams.BUILD))
    recipe.device = world.device
    options = _loader_options(loader, world)
    data = _train_data(recipe, trainer, loader, seed, adopt)
    train_loader = loading.build_loader(
        data, recipe, trainer, loader, micro=micro, seed=seed, world=world, gather=gather, options=options
    )
    data = replace(data, samples=train_loader.samples)  # a sampler may give more or less than all
    total_steps = budget(trainer, data.samples, loader.epoch_end, done)
    model = _model(recipe).to(world.device)
    if trainer.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizers = _named(recipe.build_optimizer(model), recipe)
    _check_parameters(optimizers, model)
    horizon = Horizon(total_steps, data.samples, trainer.global_batch_size)
    learning_rate = LearningRate(recipe, optimizers, horizon)
    scaler = torch.amp.GradScaler(world.device.type) if trainer.precision == "fp16" else None
    ema = EMA(model, trainer.ema_decay) if trainer.ema_decay is not None else None
    wrapped = _wrapped(model, trainer, world)
    window = Window(recipe, wrapped, world, accumulation, trainer.precision, scaler)
    return Assembly(
        data=data,
        total_steps=total_steps,
        model=model,
        wrapped=wrapped,
        optimizers=optimizers,
        loader=train_loader,
        micro_batch_size=micro,
        accumulation=accumulation,
        window=window,
        update=Update(optimizers, world.device, trainer.clip_norm, scaler),
        learning_rate=learning_rate,
        evaluation=_evaluation(recipe, model, world, trainer, options, loader.look_ahead, window, ema, seed, micro),
        parts=Parts(model, optimizers, scaler, ema, learning_rate.schedulers),
        deterministic=deterministic,
        channels_last=trainer.channels_last,
    )


def _train_data(
    recipe: Recipe, trainer: TrainerSettings, loader: LoaderSettings, seed: int, adopt: Callable[[Any], None]
) -> loading.TrainData:
    dataset = recipe.build_train_data()
    adopt(dataset)
    data = loading.train_data(dataset, recipe.build_sampler(dataset), loader, seed)
    loading.check_epochs(data, trainer, recipe.has_eval_data)
    position.check(data.samples, trainer.global_batch_size, loader.epoch_end)
    return data


def _check_recipe(recipe: Recipe) -> None:
    """Steps that are missing are found now, not after an epoch."""
    kind = type(recipe)
    if kind.train_step is Recipe.train_step:
        raise ConfigError(f"{kind.__name__} must override train_step(model, batch).")
    if recipe.has_eval_data and kind.eval_step is Recipe.eval_step:
        raise ConfigError(
            f"{kind.__name__} has evaluation data (data.eval) and must override eval_step(model, batch); "
            f"without evaluation set data.eval=null."
        )


def set_up_torch(trainer: TrainerSettings, world: World) -> bool:
    """Threads and determinism; returns whether kernels are deterministic.

    Raises:
        ConfigError: A number of threads, or options of the compiler, that cannot be.
    """
    threads: Any = trainer.num_threads
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
        raise ConfigError(f"trainer.num_threads={threads!r} must be a whole number from 1 to {MAX_THREADS}, or null.")
    if not isinstance(trainer.compile, bool | Mapping):
        raise ConfigError(
            f"trainer.compile={trainer.compile!r} must be true, false, or a mapping of options of torch.compile, such as "
            f"{{mode: reduce-overhead}}."
        )
    if trainer.num_threads is not None:
        torch.set_num_threads(trainer.num_threads)
    deterministic = trainer.deterministic if trainer.deterministic is not None else world.device.type == "cpu"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # costs a pass over memory, and nothing here reads what it did not write
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    return deterministic


def batch_shape(trainer: TrainerSettings, world: World) -> tuple[int, int]:
    """Micro-batch size and accumulation.

    Raises:
        ConfigError: The global batch cannot be cut into equal micro-batches; the message has the numbers.
    """
    total, micro = trainer.global_batch_size, trainer.micro_batch_size
    if trainer.precision not in PRECISIONS:
        raise ConfigError(f"trainer.precision={trainer.precision!r} is unknown. Use one of {', '.join(PRECISIONS)}.")
    if total % world.size or total < world.size:
        raise ConfigError(f"trainer.global_batch_size={total} is not divisible by the {world.size} ranks.")
    share = total // world.size
    micro = share if micro is None else micro
    if micro < 1 or share % micro:
        raise ConfigError(
            f"trainer.global_batch_size={total} is not divisible by {world.size} ranks x trainer.micro_batch_size={micro}: "
            f"the share of a rank is {share} samples."
        )
    return micro, share // micro


def budget(trainer: TrainerSettings, num_samples: int, epoch_end: str, done: Progress) -> int | None:
    """Steps in all: the smaller of the step and the epoch budget; none where only a time is given.

    Epochs are counted in samples: where the global batch changed between attempts, those that are left make up the
    epochs with what is done. With the same global batch it is the same number at any time.

    Raises:
        ConfigError: There is no budget at all.
    """
    limits = []
    if trainer.max_steps is not None:
        limits.append(trainer.max_steps)
    if trainer.max_epochs is not None:
        end = math.ceil(round(trainer.max_epochs * num_samples, 6))  # 0.1 epochs of 960 samples are 96, not 97
        batch = trainer.global_batch_size
        limits.append(done.step + position.steps_between(done.position, end, batch, num_samples, epoch_end))
    if not limits and trainer.max_time is None:
        raise ConfigError("The run has no end. Set trainer.max_steps, trainer.max_epochs or trainer.max_time.")
    if any(limit < 1 for limit in limits):
        raise ConfigError(
            f"trainer.max_steps={trainer.max_steps}, trainer.max_epochs={trainer.max_epochs}: must be greater than 0."
        )
    return min(limits, default=None)


def _model(recipe: Recipe) -> nn.Module:
    model: Any = recipe.build_model()
    if not isinstance(model, nn.Module):
        hint = " It is a class: call it." if isinstance(model, type) else ""
        raise ConfigError(
            f"model: {type(recipe).__name__}.build_model returned {model!r:.100}, which is no torch.nn.Module.{hint} The "
            f"factory of the model must return a module."
        )
    return model


def _named(optimizers: Any, recipe: Recipe) -> dict[str, Optimizer]:
    """The optimizers by name.

    Raises:
        ConfigError: There is none, something is no optimizer, or one that wants a closure.
    """
    named = dict(optimizers) if isinstance(optimizers, Mapping) else {"main": optimizers}
    what = f"optimizer: {type(recipe).__name__}.build_optimizer returned"
    if not named:
        raise ConfigError(f"{what} an empty mapping. Return an optimizer, or several under names.")
    for name, one in named.items():
        if not isinstance(name, str) or not isinstance(one, Optimizer):
            where = f" under the name {name!r}" if isinstance(optimizers, Mapping) else ""
            raise ConfigError(
                f"{what} {one!r:.100}{where}. Return a torch.optim.Optimizer, or a dict of names (str) to optimizers."
            )
        needed = [
            parameter.name
            for parameter in inspect.signature(one.step).parameters.values()
            if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]  # fmt: skip
        if needed:
            raise ConfigError(
                f"optimizer {name}: {type(one).__name__}.step() needs {', '.join(needed)}, as optimizers do that compute "
                f"the loss several times a step. The trainer computes it once; use an optimizer that needs no closure."
            )
    return named


def _check_parameters(optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """What is trained but is not in the model would be in no checkpoint, and be lost without a word."""
    known = {id(parameter) for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ConfigError(
                        f"optimizer {name}: parameter {place} of group {index}, of shape {list(parameter.shape)}, is not a "
                        f"parameter of the model ({type(model).__name__}), so no checkpoint would hold it. Make it part "
                        f"of the model: register it, or the module that has it, in the module that build_model returns."
                    )


def _wrapped(model: nn.Module, trainer: TrainerSettings, world: World) -> nn.Module:
    if trainer.compile:
        options = dict(trainer.compile) if isinstance(trainer.compile, Mapping) else {}
        model.compile(**options)  # in place, so that no key gets a prefix
    if world.size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)


def _loader_options(loader: LoaderSettings, world: World) -> dict[str, Any]:
    is_pinned = loader.pin_memory if world.device.type == "cuda" else False
    options: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": is_pinned}
    options["timeout"] = Duration.parse(loader.timeout, key="loader.timeout").value
    options |= {name: getattr(loader, name) for name in ("prefetch_factor", "on_error", "worker_restarts")}
    return options


def _evaluation(
    recipe: Recipe, model: nn.Module, world: World, trainer: TrainerSettings, options: Mapping[str, Any],
    look_ahead: int | None, window: Window, ema: EMA | None, seed: int, micro: int,
) -> Evaluation | None:  # fmt: skip
    built = recipe.build_eval_data()
    if built is None and type(recipe).build_eval_data is not Recipe.build_eval_data:
        return None  # a recipe that decides for itself
    if built is None and not recipe.has_eval_data:
        return None
    sets = built if isinstance(built, dict) else {"": built}
    for name, dataset in sets.items():
        key = f"data.eval.{name}" if name else "data.eval"
        if loading.length(dataset, key) == 0:
            raise DataError(f"{key}: the dataset is empty.")
    loaders = {
        name: EvalLoader(
            dataset, batch_size=trainer.eval_batch_size or micro, seed=seed, rank=world.rank, world_size=world.size,
            collate_fn=recipe.collate_in_workers, look_ahead=look_ahead, **options,
        )
        for name, dataset in sets.items()
    }  # fmt: skip
    leaves_out = options["on_error"] != "raise"
    return Evaluation(recipe, model, world, loaders, window.autocast, ema, trainer.channels_last, leaves_out)
