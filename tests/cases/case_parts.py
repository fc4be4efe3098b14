"""Models, data, recipes and callbacks that the runs of the cases use, as `tests.cases.case_parts.<name>`.

Guarantee: what a part writes lies in the run directory, one file per part, so that runs side by side do not mix.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import sys
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import job
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler
from torchvision.transforms import v2

from framework import Callback, Recipe, StepOutput
from framework.data import ImageFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from framework.checkpoint import SaveResult
    from framework.trainer import Trainer


def deeper(hidden: int = 32) -> nn.Module:
    """`job.mlp` with one more layer in it."""
    model = job.mlp(hidden)
    return nn.Sequential(OrderedDict(body=model.body, middle=nn.Linear(hidden, hidden), head=model.head))


def headless(hidden: int = 32) -> nn.Module:
    """`job.mlp` without its last layer; what is left has the same names."""
    return nn.Sequential(OrderedDict(body=job.mlp(hidden).body))


def renamed(hidden: int = 32) -> nn.Module:
    """`job.mlp` with other names for everything."""
    model = job.mlp(hidden)
    return nn.Sequential(OrderedDict(trunk=model.body, tail=model.head))


def wrapped(hidden: int = 32) -> nn.Module:
    """`job.mlp` whose parts are wrapped: one computes its activations again, the other is compiled."""
    model = job.mlp(hidden)
    body = checkpoint_wrapper(model.body)
    return nn.Sequential(OrderedDict(body=body, head=torch.compile(model.head, backend="eager")))


def warm_up(optimizer: Optimizer, steps: int = 10) -> LambdaLR:
    """A user's own scheduler: a line from 0 up to the rate of the config."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


class WildJob(job.Job):
    """The job with an argument that takes any mapping."""

    def __init__(self, *, wild: Mapping[str, Any] | None = None, **factories: Any) -> None:
        super().__init__(**factories)
        self.wild = wild


class DrawingJob(job.Job):
    """Rank 1 draws three more numbers in each step than rank 0; five draws of each generator are logged."""

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        if os.environ["RANK"] == "1":
            torch.rand(3), np.random.random(3), [random.random() for _ in range(3)]
        return super().train_step(model, batch)


class SampledJob(job.Job):
    """The job with the sampler that users of several processes give."""

    def build_sampler(self, dataset: Any) -> Any:
        return DistributedSampler(dataset)


class FailingJob(job.Job):
    """Ends in one of its steps.

    Args:
        at: Number of the call of `train_step`, from 1.
        how: `raise` an error, or `exit` the interpreter.
        **factories: Passed on to `Job`.
    """

    def __init__(self, *, at: int, how: str = "raise", **factories: Any) -> None:
        super().__init__(**factories)
        self._left = at
        self._how = how

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        self._left -= 1
        if self._left == 0:
            if self._how == "exit":
                sys.exit(0)
            raise LookupError("the step of the user failed")
        return super().train_step(model, batch)


class FiveMetrics(FailingJob):
    """Logs five metrics a step; ends in step `at`, if that comes."""

    def __init__(self, *, at: int = 1_000_000, **factories: Any) -> None:
        super().__init__(at=at, **factories)

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        loss = super().train_step(model, batch).loss
        return StepOutput(loss, metrics={f"metric{number}": loss.detach() * number for number in range(5)})


def broken_samples() -> Any:
    """A dataset that cannot be built."""
    raise OSError("the shelf with the samples is empty")


class Pictures(ImageFolder):
    """Images in one size; appends the absolute path of each file that is opened to the file `$OPENED`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = (self.root / self.sample_key(index)).absolute()
        with Path(os.environ["OPENED"]).open("a") as log:
            log.write(f"{os.path.realpath(path)}\n")
        image, label = super().__getitem__(index)
        return {"x": image.float().flatten()[: job.FEATURES] / 255, "y": label, "id": index}


def pictures(root: str, part: str = "train") -> Pictures:
    """The images below `root/part`."""
    return Pictures(Path(root) / part)


class Synchronous(Callback):
    """No step begins before the save of the step before is committed."""

    def step_start(self, trainer: Trainer) -> None:
        assert trainer.saver is not None
        trainer.saver.finish(trainer)


class SlowDisk(Callback):
    """Every write below the run's checkpoints goes out in tenths, with a pause before each.

    Args:
        seconds: How long the shard file of a save takes.
    """

    def __init__(self, seconds: float) -> None:
        self._pause = seconds / 10

    def setup(self, trainer: Trainer) -> None:
        write = os.write

        def slowly(fd: int, data: Any) -> int:
            if not os.readlink(f"/proc/self/fd/{fd}").endswith(".distcp"):
                return write(fd, data)
            time.sleep(self._pause)
            return write(fd, data[: max(4096, len(data) // 10 + 1)])

        os.write = slowly


class Unprivileged(Callback):
    """From its setup on, modes of files and folders hold for root too: the process gives two of its capabilities up."""

    def setup(self, trainer: Trainer) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        data = (ctypes.c_uint32 * 6)()  # twice effective, permitted, inheritable
        assert libc.capget(header, data) == 0
        data[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


class Reference(Callback):
    """At each save copies model and optimizer at once, on the main thread, with torch alone: `reference/<step>.pt`."""

    def save_start(self, trainer: Trainer, reason: str) -> None:
        folder = trainer.run.path / "reference"
        folder.mkdir(exist_ok=True)
        state = {"model": trainer.built.model.state_dict(), "optimizer": trainer.built.optimizers["main"].state_dict()}
        torch.save(state, folder / f"{trainer.progress.step}.pt")


class Weights(Callback):
    """Writes the model at the start and at the end of an attempt: `weights/<attempt>.{start,end}.pt`."""

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        self._write(trainer, "start")

    def train_end(self, trainer: Trainer, status: str) -> None:
        self._write(trainer, "end")

    def _write(self, trainer: Trainer, when: str) -> None:
        folder = trainer.run.path / "weights"
        folder.mkdir(exist_ok=True)
        torch.save(trainer.built.model.state_dict(), folder / f"{trainer.attempt}.{when}.pt")


class Draws(Callback):
    """Appends five draws of each generator of this rank after every step: `draws/rank<r>.jsonl`."""

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        folder = trainer.run.path / "draws"
        folder.mkdir(exist_ok=True)
        line = {
            "step": trainer.progress.step,
            "torch": torch.rand(5).tolist(),
            "numpy": np.random.random(5).tolist(),
            "python": [random.random() for _ in range(5)],
        }
        with (folder / f"rank{trainer.world.rank}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")


class Counter(Callback):
    """Counts its own calls over all attempts; at the end writes the count to `<its name>.count`."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._count = 0

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        self._count += 1

    def train_end(self, trainer: Trainer, status: str) -> None:
        (trainer.run.path / f"{self.name}.count").write_text(str(self._count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]


class Troubled(Callback):
    """Raises in a step, or in its own close, and notes each of its closes in `closes`.

    Args:
        step: After which step it raises.
        in_close: Whether `close` raises too.
    """

    def __init__(self, step: int | None = None, in_close: bool = False) -> None:
        self._step = step
        self._in_close = in_close

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if trainer.progress.step == self._step:
            raise LookupError("the third party lost something")

    def close(self, trainer: Trainer) -> None:
        with (trainer.run.path / "closes").open("a") as log:
            log.write(f"{self.name}\n")
        if self._in_close:
            raise RuntimeError("the door is stuck")


class Arguments(Callback):
    """Writes the types of its arguments to `arguments.json`."""

    def __init__(self, every: int = 1, **more: Any) -> None:
        self.every = every
        self._types = {name: type(value).__name__ for name, value in {"every": every, **more}.items()}

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        order = list(trainer.callbacks)
        (trainer.run.path / "arguments.json").write_text(json.dumps({"types": self._types, "order": order}))


class Saved(Callback):
    """Appends the step of every committed save to `saved`."""

    def save_committed(self, trainer: Trainer, result: SaveResult) -> None:
        with (trainer.run.path / "saved").open("a") as log:
            log.write(f"{result.step}\n")


def small() -> Any:
    """A transform to 8 x 8 pixels."""
    return v2.Resize((8, 8), antialias=True)


def image_model() -> nn.Module:
    """A linear model of such images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, job.CLASSES))


class ImageJob(Recipe):
    """Classifies images."""

    def train_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> StepOutput:
        return StepOutput(nn.functional.cross_entropy(model(batch[0].float() / 255), batch[1]))

    def eval_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        logits = model(batch[0].float() / 255)
        return {"loss": nn.functional.cross_entropy(logits, batch[1], reduction="none")}


class Sizes(Callback):
    """Writes the size of every batch that was trained: `sizes`, a JSON list."""

    def setup(self, trainer: Trainer) -> None:
        self._sizes: list[int] = []
        step = trainer.recipe.train_step

        def watched(model: nn.Module, batch: Any) -> StepOutput | Tensor:
            self._sizes.append(len(batch[0]))
            return step(model, batch)

        trainer.recipe.train_step = watched  # type: ignore[method-assign]

    def train_end(self, trainer: Trainer, status: str) -> None:
        (trainer.run.path / "sizes").write_text(json.dumps(self._sizes))


class SlowSamples(job.Samples):
    """Appends time and id of each sample that is made to a file.

    Args:
        samples: How many.
        log: The file.
        seconds: How long each takes.
    """

    def __init__(self, samples: int, log: str, seconds: float = 0.0) -> None:
        super().__init__(samples)
        self._log = log
        self._seconds = seconds

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(self._log, "a") as log:
            log.write(f"{time.time()} {index}\n")
        time.sleep(self._seconds)
        return super().__getitem__(index)


class Chatty(Callback):
    """Says a line every 5 steps in each way that users have, and shows a display of its own in each evaluation.

    Every line has the step in it, so that it can be told which came.
    """

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        step = trainer.progress.step
        if step % 5 == 0:
            print(f"printed {step};")
            print(f"complained {step};", file=sys.stderr)
            logging.getLogger("user").warning("logged %d;", step)
            warnings.warn(f"warned {step};", stacklevel=1)

    def eval_start(self, trainer: Trainer) -> None:
        from rich.progress import track

        for _ in track(range(3), description=f"mine {trainer.progress.step};"):
            time.sleep(0.01)


class Warns(Callback):
    """Logs a line of each level on every rank, once."""

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if trainer.progress.step == 3:
            rank = trainer.world.rank
            logging.getLogger("framework.cases").info("quiet %d;", rank)
            logging.getLogger("user").warning("loud %d;", rank)
