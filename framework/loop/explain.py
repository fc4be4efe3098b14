"""What will run, in what order, and whether a resume would be exact: for `--explain` and `--validate`.

Guarantee: the text is made from the objects that would run, not from a description of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from framework.checkpoint import CheckpointStore
from framework.data import private
from framework.speaking import count_text

if TYPE_CHECKING:
    from framework.loop.loading import TrainData
    from framework.trainer import Trainer

THE_STEP = """\
  poll requests · fetch micro-batches · forward and backward · unscale, clip, finite check
  optimizer step · learning rate of the next step · progress advances · step_end
  evaluate if due · save if due or requested (the one safe point) · stop if requested"""


def notes(trainer: Trainer) -> list[str]:
    """What would not be exact after a resume, and why; empty if it would be bit for bit."""
    found = []
    if not trainer.built.deterministic:
        found.append("not bitwise: kernels are not deterministic here; set trainer.deterministic=true")
    if trainer.settings.compile:
        found.append("torch.compile is on: bitwise as long as the compiler makes the same code again")
    where = private.unseeded(trainer.built.loader.dataset)
    found += [f"random numbers of the data cannot be seeded per sample: {one}" for one in where]
    return found


def describe(trainer: Trainer, more: Sequence[str] = ()) -> str:
    """The plan of a run as text.

    Args:
        trainer: It has built everything.
        more: Notes about what is not exact, beside those of `notes`.
    """
    built, settings = trainer.built, trainer.settings
    parameters = sum(parameter.numel() for parameter in built.model.parameters())
    steps = f"{built.total_steps} steps" if built.total_steps is not None else f"until {settings.max_time} are used up"
    epochs = (
        built.total_steps * settings.global_batch_size / built.num_samples
        if built.total_steps is not None and built.data.known_samples is not None
        else None
    )
    newest = CheckpointStore(trainer.run.checkpoints).newest()
    lines = [
        f"run          {trainer.name} in {trainer.run.shown}",
        f"resume       {'from step ' + str(newest.step) if newest is not None else 'nothing to resume: starts at step 0'}",
        f"recipe       {type(trainer.recipe).__module__}.{type(trainer.recipe).__qualname__}",
        f"model        {type(built.model).__name__}, {parameters:,} parameters, {settings.precision} on {trainer.world.device}",
        f"optimizer    {', '.join(f'{name}: {type(one).__name__}' for name, one in built.optimizers.items())}",
        f"data         {_samples(built.data)}, position by '{built.strategy}': {built.data.how}",
        f"step         {settings.global_batch_size} samples = {count_text(trainer.world.size, 'rank')} x "
        f"{settings.global_batch_size // trainer.world.size // built.accumulation} x {built.accumulation} micro-batches",
        f"budget       {steps}" + (f" = {epochs:.2f} epochs" if epochs is not None else ""),
        "",
        "each step:",
        THE_STEP,
        "",
        "callbacks, in the order they are called:",
        *(f"  {line}" for line in trainer.events.plan()),
        "",
        "exact after a resume:",
        *(
            f"  {note}"
            for note in [*notes(trainer), *more] or ["bit for bit: weights, optimizer, random numbers, data order"]
        ),
    ]
    return "\n".join(lines)


def _samples(data: TrainData) -> str:
    return "samples without a known number" if data.known_samples is None else f"{data.known_samples:,} samples"
