"""RNGStateCallback: the random number streams of every rank, captured and restored.

Guarantee: after a resume every stream goes on where it was: python, numpy, torch on the CPU and each CUDA device, and
the generators that a recipe registers. They are restored last, when nothing else of the start-up draws from them.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework.callback import Callback
from framework.data import seeding
from framework.errors import ConfigError
from framework.loop import streams

if TYPE_CHECKING:
    from framework.checkpoint import Found
    from framework.trainer import Trainer

log = logging.getLogger(__name__)


class RNGStateCallback(Callback):
    """Saves and restores the random number generators of each rank."""

    promise = "random numbers after a resume (dropout, noise) differ from those of the unbroken run"

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.before_first_step.append(self._restore)
        for name, generator in trainer.recipe.generators.items():
            if not isinstance(generator, torch.Generator | np.random.Generator | random.Random):
                raise ConfigError(
                    f"Recipe.generators['{name}'] is a {type(generator).__name__}. Register a torch.Generator, a "
                    f"numpy.random.Generator or a random.Random."
                )

    def rank_state_dict(self) -> dict[str, Any]:
        generators = self._trainer.recipe.generators
        return {"process": seeding.capture(), "recipe": {name: _get(one) for name, one in generators.items()}}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_loaded(self, trainer: Trainer, found: Found) -> None:
        if self._state is None:
            log.warning(
                "resume: rank %d has no saved generators (there were %d ranks); its stream starts anew from the seed",
                trainer.world.rank, found.manifest.world_size,
            )  # fmt: skip
            streams.start(streams.derive(trainer.seed, streams.TRAIN + f"/{trainer.progress.step}", trainer.world.rank))

    def _restore(self) -> None:
        """Called before the first step, and again after a rollback; a run that begins has nothing to restore."""
        if self._state is None:
            return
        seeding.restore(self._state["process"])
        for name, generator in self._trainer.recipe.generators.items():
            if name in self._state["recipe"]:
                _set(generator, self._state["recipe"][name])


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": list(words), "gauss": gauss}
    return seeding.plain(generator.bit_generator.state)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"]), state["gauss"]))
    else:
        generator.bit_generator.state = state
