"""An exponential moving average of the weights.

Guarantee: the average is a function of the steps alone, has its own keys in the checkpoint, and while it is swapped
in for an evaluation the live weights are untouched and come back whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from framework.errors import ConfigError


class EMA:
    """average = decay * average + (1 - decay) * weight, after every step. Buffers are the live ones.

    Args:
        model: The bare model.
        decay: In (0, 1).

    Attributes:
        average: The averages by parameter name.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ConfigError(f"trainer.ema_decay={decay} must lie between 0 and 1.")
        self.decay = decay
        self._live = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
        self.average = {name: value.detach().clone() for name, value in self._live.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Starts anew from the current weights."""
        torch._foreach_copy_(list(self.average.values()), list(self._live.values()))

    @torch.no_grad()
    def update(self) -> None:
        """Takes the current weights into the average."""
        torch._foreach_lerp_(list(self.average.values()), list(self._live.values()), 1.0 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the average inside this block; nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, live in self._live.items():
            average = self.average[name]
            live.data, average.data = average.data, live.data
