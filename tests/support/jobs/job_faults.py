"""A callback that goes wrong in many ways, each once in the life of a run."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import torch

from framework import Callback

if TYPE_CHECKING:
    from framework.trainer import Trainer

KINDS = ("error", "memory", "exit", "segv", "abort", "gradient", "sample")


class Trip(Callback):
    """Fails during one step.

    Args:
        step: The step, counted from 1, or the first one after it that this attempt does.
        kind: `error` and `memory` are raised; `exit` leaves without a word; `segv` and `abort` as native code dies;
            `gradient` makes one that is NaN; `sample` is raised by the dataset.
        rank: On which rank.
    """

    def __init__(self, step: int, kind: str, rank: int = 0) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is none of {', '.join(KINDS)}")
        self._step = step
        self._kind = kind
        self._rank = rank
        self._is_due = False

    def setup(self, trainer: Trainer) -> None:
        self._marker = trainer.run.path / f"{self.name}.fired"
        if self._kind == "sample" and trainer.world.rank == self._rank:
            dataset: Any = type(trainer.built.loader.dataset)
            load = dataset.__getitem__

            def watched(samples: Any, index: int) -> Any:
                if trainer.progress.step + 1 >= self._step and self._is_first():
                    raise ValueError(f"sample {index} is broken")
                return load(samples, index)

            dataset.__getitem__ = watched

    def step_start(self, trainer: Trainer) -> None:
        is_mine = trainer.world.rank == self._rank and self._kind != "sample"
        if is_mine and trainer.progress.step + 1 >= self._step and self._is_first():
            self._go_wrong()

    def grads_ready(self, trainer: Trainer) -> None:
        if self._is_due:
            self._is_due = False
            for parameter in trainer.built.parts.model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(torch.nan)

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _go_wrong(self) -> None:
        match self._kind:
            case "error":
                raise RuntimeError("a step went wrong")
            case "memory":
                raise MemoryError("no memory is left")
            case "exit":
                os._exit(3)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "abort":
                os.abort()
            case "gradient":
                self._is_due = True
