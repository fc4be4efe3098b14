"""Small real runs for tests: a recipe whose faults can be chosen, a trainer in one line, and what a run left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from framework.callback import Callback
from framework.callbacks import (
    AsyncCheckpointCallback,
    AutoResumeCallback,
    DataPositionCallback,
    NonFiniteCallback,
    RNGStateCallback,
)
from framework.checkpoint import CheckpointStore
from framework.journal import read_run
from framework.recipe import Recipe, StepOutput
from framework.settings import LoaderSettings, RunSettings, TrainerSettings
from framework.trainer import Trainer

FEATURES = 4


class Points(Dataset[dict[str, Any]]):
    """Sample i: `x` float32 `[4]`, `y` float32 `[1]`, both functions of i, and its `id`."""

    def __init__(self, samples: int = 64) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True).sin(), "id": index}


def net(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Fit(Recipe):
    """Fits the points.

    Args:
        bad_ids: A micro-batch with one of these samples has a loss of `bad`.
        bad: By what the loss of such a micro-batch is multiplied.
        times: How often that happens; none for always.
        **factories: Passed on to `Recipe`; each has a default.
    """

    def __init__(
        self, *, bad_ids: Iterable[int] = (), bad: float = float("nan"), times: int | None = None, **factories: Any
    ) -> None:
        super().__init__(**{"model": net, "optimizer": sgd, "train_data": Points, **factories})
        self._bad_ids = torch.tensor(list(bad_ids), dtype=torch.long)
        self._bad = bad
        self._times = times
        self.seen: list[list[int]] = []

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput | Tensor:
        self.seen.append(batch["id"].tolist())
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        if torch.isin(batch["id"], self._bad_ids).any() and self._times != 0:
            self._times = None if self._times is None else self._times - 1
            return loss * self._bad
        return loss

    def eval_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": ((model(batch["x"]) - batch["y"]) ** 2).flatten()}


class Crash(Callback):
    """Fails at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if trainer.progress.step == self._step:
            raise RuntimeError(f"crashed at {self._step}")


class Settle(Callback):
    """Waits at each step for the save under way, so that which steps are saved does not depend on the machine."""

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if trainer.saver is not None:
            trainer.saver.finish(trainer)


class Ask(Callback):
    """Makes a request at a step: `Ask(5, "stop", "enough")` calls `trainer.request_stop("enough")`."""

    def __init__(self, step: int, request: str, *arguments: Any) -> None:
        self._step = step
        self._request = request
        self._arguments = arguments or ("asked",)

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if trainer.progress.step == self._step:
            getattr(trainer, f"request_{self._request}")(*self._arguments)


def core(every: str | int | None = 4, policy: str = "stop", limit: int = 10, **more: Callback) -> dict[str, Callback]:
    """The callbacks that make a run exact, and further ones."""
    return {
        "auto_resume": AutoResumeCallback(),
        "rng_state": RNGStateCallback(),
        "data_position": DataPositionCallback(),
        "async_checkpoint": AsyncCheckpointCallback(every=every, keep=None),
        "non_finite": NonFiniteCallback(policy, limit),
        "settle": Settle(),
        **more,
    }


def make(
    path: Path, recipe: Recipe | None = None, callbacks: Mapping[str, Callback] | None = None, *, seed: int = 0,
    config: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None, epoch_end: str = "carry",
    loader: Mapping[str, Any] | None = None, **settings: Any,
) -> Trainer:  # fmt: skip
    """A trainer of 12 steps of 8 samples, with the callbacks of `core` and a checkpoint every 4 steps."""
    defaults: dict[str, Any] = {
        "max_steps": 12, "global_batch_size": 8, "eval_every": None, "device": "cpu", "timeout": "60s",
    }  # fmt: skip
    return Trainer(
        recipe or Fit(),
        core() if callbacks is None else callbacks,
        trainer=TrainerSettings(**{**defaults, **settings}),
        loader=LoaderSettings(**{"num_workers": 0, "epoch_end": epoch_end, **(loader or {})}),
        run=RunSettings(dir=str(path), **(run or {})),
        seed=seed,
        config=config,
    )


def fit(path: Path, *arguments: Any, **options: Any) -> Trainer:
    """Runs a trainer to its end and returns it."""
    trainer = make(path, *arguments, **options)
    assert trainer.fit() == 0
    return trainer


def events(path: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The journal of a run, or its events of one name."""
    return [event for event in read_run(path / "events") if name in (None, event["ev"])]


def by_step(path: Path, column: str = "loss") -> dict[int, float]:
    """Loss (or `lr`) of each step; the newest record of a step wins."""
    found: dict[int, float] = {}
    for event in events(path, "steps"):
        found.update(enumerate(event[column], start=event["first"]))
    return found


def skipped(path: Path) -> set[int]:
    return {step for event in events(path, "steps") for step in event["skipped"]}


def saved_steps(path: Path) -> list[int]:
    return sorted(found.step for found in CheckpointStore(path / "checkpoints").list())


def flat(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of every tensor that a checkpoint of the live run would hold."""
    found: dict[str, Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[prefix] = value.detach().clone()
        else:
            for key, one in value.items():
                walk(f"{prefix}.{key}" if prefix else key, one)

    walk("", trainer.built.parts.tensors())
    return found


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor], close: float = 0.0) -> None:
    """Bit for bit, or within a relative and absolute distance."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        if close:
            torch.testing.assert_close(
                value, right[key], rtol=close, atol=close, msg=lambda text, key=key: f"{key}: {text}"
            )
        else:
            assert torch.equal(value, right[key]), key


def crash_then_resume(
    path: Path,
    crash_at: int,
    recipe: Callable[[], Recipe],
    callbacks: Callable[..., dict[str, Callback]] = core,
    **options: Any,
) -> Trainer:
    """Fails after a step, and starts the same command again."""
    try:
        make(path, recipe(), callbacks(crash=Crash(crash_at)), **options).fit()
    except RuntimeError as error:
        assert "crashed at" in str(error)
    return fit(path, recipe(), callbacks(), **options)
