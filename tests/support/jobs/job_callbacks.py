"""Callbacks of the tests' job: the id log, kills at an exact place, slow saves.

Guarantee: a kill happens exactly once in the life of a run (a marker file in the run directory remembers it), so that
the same command, started again, goes through.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework import Callback
from framework.checkpoint import CheckpointWriter, commit, files, removal
from framework.checkpoint.commit import Committer
from framework.checkpoint.manifest import METADATA
from framework.checkpoint.snapshot import Snapshots

if TYPE_CHECKING:
    from framework.checkpoint import Found, SaveHeader
    from framework.recipe import StepOutput
    from framework.trainer import Trainer


class IdLog(Callback):
    """Appends one JSON line per step and rank to `RUN/ids/rank<r>.jsonl`.

    Fields: attempt, epoch, step, rank, ids, loss (hex), lr (hex). `epoch` is that of the step's first sample. Needs the
    recipe `job.Job`.
    """

    def setup(self, trainer: Trainer) -> None:
        folder = trainer.run.path / "ids"
        folder.mkdir(exist_ok=True)
        self._fd = os.open(folder / f"rank{trainer.world.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step_start(self, trainer: Trainer) -> None:
        trainer.recipe.seen.clear()  # type: ignore[attr-defined]
        self._rate = trainer.built.learning_rate.current
        self._epoch = trainer.progress.epoch

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        line = {
            "attempt": trainer.attempt,
            "epoch": self._epoch,
            "step": trainer.progress.step,
            "rank": trainer.world.rank,
            "ids": list(trainer.recipe.seen),  # type: ignore[attr-defined]
            "loss": float(output.loss).hex(),
            "lr": float(self._rate).hex(),
        }
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def close(self, trainer: Trainer) -> None:
        os.close(self._fd)


class ScalerPace(Callback):
    """Sets how many good steps the fp16 loss scaler waits before it doubles the scale, and the scale to begin with."""

    def __init__(self, growth_interval: int = 3, scale: float = 1024.0) -> None:
        self._growth_interval = growth_interval
        self._scale = scale

    def setup(self, trainer: Trainer) -> None:
        scaler = trainer.built.parts.scaler
        assert scaler is not None
        state = {"scale": self._scale, "growth_factor": 2.0, "backoff_factor": 0.5, "_growth_tracker": 0}
        scaler.load_state_dict({**state, "growth_interval": self._growth_interval})


class SlowSave(Callback):
    """Makes saves take longer, so that training goes on beside them and a kill can hit them.

    Args:
        write_seconds: Before each rank's first file.
        commit_seconds: Before rank 0 publishes.
        stall_seconds: While the state is taken: training stands still.
    """

    def __init__(self, write_seconds: float = 0.0, commit_seconds: float = 0.0, stall_seconds: float = 0.0) -> None:
        self._write = write_seconds
        self._commit = commit_seconds
        self._stall = stall_seconds

    def setup(self, trainer: Trainer) -> None:
        if self._stall:
            _before(Snapshots, "take", lambda *_: time.sleep(self._stall))
        _before(Committer, "_write", lambda *_: time.sleep(self._write))
        _before(Committer, "_seal", lambda *_: time.sleep(self._commit))


class Settle(Callback):
    """Before each step waits for the save in flight: no save is skipped, and what is committed when is certain."""

    def step_start(self, trainer: Trainer) -> None:
        assert trainer.saver is not None
        trainer.saver.finish(trainer)


class Draw(Callback):
    """After a resume draws once too often from one generator: what a stream that is not restored looks like.

    Args:
        stream: `python`, `numpy` or `torch`, or the name of one of the recipe's generators.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        if resumed:
            trainer.before_first_step.append(lambda: self._draw(trainer))

    def _draw(self, trainer: Trainer) -> None:
        if self._stream == "python":
            random.random()
        elif self._stream == "numpy":
            np.random.random()
        elif self._stream == "torch":
            torch.rand(1)
        else:
            generator = trainer.recipe.generators[self._stream]
            _ = torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()


class Shift(Callback):
    """After a resume goes on one sample too late."""

    def state_loaded(self, trainer: Trainer, found: Found) -> None:
        trainer.progress = trainer.progress._replace(position=trainer.progress.position + 1)


class KillAt(Callback):
    """Sends a signal to its own process, once in the life of the run, at an exact place.

    Args:
        step: The step during which, counted from 1; for the phases of a save the first saved step from there on, for
            `evaluation` the first evaluated one, ignored for `restored`.
        phase: `fetch` inside the dataset, also in a loader process (the trainer is killed, not the loader process);
            `forward` and `backward` inside the model's; `before_update`; `after_update` of the first optimizer;
            `step_end`; `staging` before the state is copied; `writing` when half of a file is on disk; `sealing` when
            all files are, before the manifest; `commit` right before `.metadata` gets its name; `committed` right
            after, before that is forced to disk; `retention` in the middle of deleting an old checkpoint;
            `evaluation`; `restored` when a checkpoint was loaded, before the first step.
        rank: On which rank.
        number: Name of the signal.
        count: The how-manieth time in that step (micro-batch, sample, evaluation batch), from 0.
    """

    def __init__(self, step: int, phase: str, rank: int = 0, number: str = "SIGKILL", count: int = 0) -> None:
        if phase not in PHASES:
            raise ValueError(f"phase={phase!r} is none of {', '.join(PHASES)}")
        self._step = step
        self._phase = phase
        self._rank = rank
        self._number = signal.Signals[number]
        self._count = count
        self._shared = mmap.mmap(-1, 8)  # the step under way, seen by loader processes too
        self._calls = (0, 0)
        self._saving = 0

    def setup(self, trainer: Trainer) -> None:
        self._pid = os.getpid()
        self._marker = trainer.run.path / f"{self.name}.fired"
        self._trainer = trainer
        if trainer.world.rank == self._rank and not self._marker.exists():
            PHASES[self._phase](self)

    def step_start(self, trainer: Trainer) -> None:
        self._now = trainer.progress.step + 1

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if self._phase == "step_end" and trainer.world.rank == self._rank:
            self._in_step()

    def state_loaded(self, trainer: Trainer, found: Found) -> None:
        if self._phase == "restored" and trainer.world.rank == self._rank:
            self._fire()

    @property
    def _now(self) -> int:
        return int.from_bytes(self._shared[:8], "little")

    @_now.setter
    def _now(self, step: int) -> None:
        self._shared[:8] = step.to_bytes(8, "little")

    def _fire(self) -> None:
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(self._pid, self._number)
        while self._number == signal.SIGKILL:  # a loader process: the trainer goes first
            time.sleep(1)

    def _in_step(self, *_: Any) -> None:
        now = self._now
        self._calls = (now, self._calls[1] + 1 if self._calls[0] == now else 0)
        if self._calls == (self._step, self._count):
            self._fire()

    def _fetch(self) -> None:
        def watched(*_: Any) -> None:
            if self._now > self._step:  # a loader process may have been ahead and idle during the step
                self._fire()
            self._in_step()

        _before(type(self._trainer.built.loader.dataset), "__getitem__", watched)

    def _forward(self) -> None:
        self._trainer.built.model.register_forward_hook(lambda module, *_: self._in_step() if module.training else None)

    def _backward(self) -> None:
        next(self._trainer.built.model.parameters()).register_hook(self._in_step)

    def _before_update(self) -> None:
        next(iter(self._trainer.built.optimizers.values())).register_step_pre_hook(self._in_step)

    def _after_update(self) -> None:
        next(iter(self._trainer.built.optimizers.values())).register_step_post_hook(self._in_step)

    def _staging(self) -> None:
        self._watch_saves()
        _before(Snapshots, "take", lambda *_: self._in_save())

    def _writing(self) -> None:
        self._watch_saves()
        original = files._write_pieces

        def torn(fd: int, view: memoryview) -> Any:
            if self._is_due_in_save and not self._marker.exists():
                if self._number == signal.SIGKILL:
                    os.write(fd, view[: len(view) // 2])
                self._fire()
            return original(fd, view)

        files._write_pieces = torn

    def _sealing(self) -> None:
        self._watch_saves()
        _before(Committer, "_seal", lambda *_: self._in_save())

    def _commit(self) -> None:
        self._watch_saves()
        replace = os.replace

        def watched(source: Any, target: Any, **options: Any) -> None:
            if Path(target).name == METADATA:
                self._in_save()
            replace(source, target, **options)

        commit.os.replace = watched  # type: ignore[attr-defined]

    def _committed(self) -> None:
        self._watch_saves()
        _before_function(files, "sync_folder", lambda path: (path / METADATA).exists() and self._in_save())

    def _retention(self) -> None:
        def half(folder: Path) -> None:
            """Its `.metadata` is gone already."""
            if self._trainer.progress.step >= self._step:
                self._fire()

        _before_function(removal, "discard", half)

    def _evaluation(self) -> None:
        recipe: Any = self._trainer.recipe
        original = recipe.eval_step

        def watched(model: Any, batch: Any) -> Any:
            step = self._trainer.progress.step
            if step >= self._step:
                self._now = self._step
                self._in_step()
            return original(model, batch)

        recipe.eval_step = watched

    def _watch_saves(self) -> None:
        def remember(writer: CheckpointWriter, state: Any, header: SaveHeader) -> None:
            self._saving = header.step

        _before(CheckpointWriter, "start", remember)

    @property
    def _is_due_in_save(self) -> bool:
        return self._saving >= self._step

    def _in_save(self) -> None:
        if self._is_due_in_save:
            self._fire()

    def _nothing(self) -> None: ...


PHASES: dict[str, Callable[[KillAt], None]] = {
    "fetch": KillAt._fetch,
    "forward": KillAt._forward,
    "backward": KillAt._backward,
    "before_update": KillAt._before_update,
    "after_update": KillAt._after_update,
    "step_end": KillAt._nothing,
    "staging": KillAt._staging,
    "writing": KillAt._writing,
    "sealing": KillAt._sealing,
    "commit": KillAt._commit,
    "committed": KillAt._committed,
    "retention": KillAt._retention,
    "evaluation": KillAt._evaluation,
    "restored": KillAt._nothing,
}


def _before(owner: Any, name: str, hook: Callable[..., object]) -> None:
    """Calls `hook` with the arguments of a method right before it."""
    _before_function(owner, name, hook)


def _before_function(owner: Any, name: str, hook: Callable[..., object]) -> None:
    original = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        hook(*args, **options)
        return original(*args, **options)

    setattr(owner, name, watched)
