"""What a training loop costs the main thread per step, beside other trainers in the same run.

    python benchmarks/loop_overhead.py [--steps 300] [--rounds 20] [--processes 3] [--only ours] [--json result.json]

Every contender trains the same model (`Linear(8, 1)`, batch 1, SGD, mean squared error) on the same batches, made
before anything is timed and handed out by the same iterator, so that no loader is in the numbers; ours gets them by
exchanging its loader right before the first step. Ours runs with all default callbacks (a save every 10 minutes, none
of which falls due here; the MLflow exporter is a process of its own); the others run as lean as they can be set.

What is printed is CPU time, not wall time: of the main thread (`time.thread_time_ns`), and of all threads of the
process (`time.process_time_ns`) for those that keep threads busy. Each contender has a process of its own, and they
take turns, one round each; then all start anew in fresh processes, since where the memory of a process happens to lie
shifts its numbers by some percent. The overhead is the best round of all less the best round of the bare loop, after a
warm-up that is not counted. The loader's own cost with 0 workers stands apart, as `loader_overhead.py` measures it.
Trainers that are not installed are left out, with the reason: `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, NUM_BATCHES = 8, 64
WARM_UP, AGAIN = 300, 50  # steps that are not counted: at the start, and before each round, when caches are cold
TARGET = 20.0  # µs
PATIENCE_SECONDS = 300.0  # for one round; imports and start included

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """How much is measured in each process: `rounds` times `steps` steps."""

    steps: int
    rounds: int

    @property
    def total_steps(self) -> int:
        """Steps that a contender is to make; the last one only asks for the batch that closes the last round."""
        return WARM_UP + self.rounds * (AGAIN + self.steps) + 1


@dataclass(frozen=True)
class Time:
    """CPU time per step, in µs: of the main thread, and of all threads of the process."""

    main: float
    every: float


class Stopwatch:
    """CPU time per step since it was started."""

    def __init__(self) -> None:
        self._main, self._every = time.thread_time_ns(), time.process_time_ns()

    def time(self, steps: int) -> Time:
        main, every = time.thread_time_ns(), time.process_time_ns()
        return Time((main - self._main) / steps / 1000, (every - self._every) / steps / 1000)


class Premade:
    """An iterator over ready batches that knows where rounds begin and end; between rounds it waits for its turn.

    Args:
        plan: How much is measured.
        line: To the parent: nothing once warm, then for every message from there the time of a round.
    """

    def __init__(self, plan: Plan, line: Connection) -> None:
        self.plan = plan
        self._line = line
        self._batches: Iterator[Any] = itertools.cycle(make_batches())

    def as_keywords(self) -> None:
        """Batches are `{"x": ..., "labels": ...}` from now on."""
        self._batches = itertools.cycle([{"x": x, "labels": y} for x, y in make_batches()])

    def __len__(self) -> int:
        return self.plan.total_steps

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self._batches, WARM_UP)
        self._line.send(None)
        for _ in range(self.plan.rounds):
            if not self._line.poll(PATIENCE_SECONDS):
                raise TimeoutError("the parent process gave no turn")
            self._line.recv()
            yield from itertools.islice(self._batches, AGAIN)
            watch = Stopwatch()
            yield from itertools.islice(self._batches, self.plan.steps)
            self._line.send(watch.time(self.plan.steps))
        yield from self._batches  # some look one batch ahead


def make_batches() -> list[Batch]:
    """Pairs of `[1, 8]` and `[1, 1]`, float32."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    return [(draw(1, FEATURES), draw(1, 1)) for _ in range(NUM_BATCHES)]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


# -- contenders ------------------------------------------------------------------------------------------------------


def run_bare(premade: Premade) -> None:
    model, optimizer = make_model()
    for batch in itertools.islice(premade, premade.plan.total_steps):
        compute_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def run_ours(premade: Premade) -> None:
    from framework import Callback, Recipe, Trainer
    from framework.config import build_callbacks, compose
    from framework.data.stats import DataStats
    from framework.settings import LoaderSettings, RunSettings, TrainerSettings

    class Lean(Recipe):
        def build_model(self) -> nn.Module:
            return make_model()[0]

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.01)

        def build_train_data(self) -> Any:
            return range(1 << 40)  # only its length is used; no epoch ends here

        def train_step(self, model: nn.Module, batch: Batch) -> Tensor:
            return compute_loss(model, batch)

    class Ready:
        """Stands in for the loader."""

        dataset = None
        num_workers = 0

        def seek(self, position: int) -> None: ...
        def close(self) -> None: ...
        def commit(self, batches: int) -> list[Any]:
            return []

        def take_stats(self) -> DataStats:
            return DataStats()

        def __iter__(self) -> Iterator[Batch]:
            return iter(premade)

    class ExchangeLoader(Callback):
        def setup(self, trainer: Trainer) -> None:
            trainer.built.loader.close()
            trainer.built.loader = Ready()

    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            Lean(),
            {**build_callbacks(compose(["+recipe=toy"])), "ready": ExchangeLoader()},
            trainer=TrainerSettings(max_steps=premade.plan.total_steps, global_batch_size=1, device="cpu"),
            loader=LoaderSettings(num_workers=0),
            run=RunSettings(root=root, name="bench"),
        )
        trainer.fit()


def run_ignite(premade: Premade) -> None:
    from ignite.engine import Engine

    engine = Engine(_ignite_step())
    engine.run(premade, max_epochs=1, epoch_length=premade.plan.total_steps)


def run_ignite_guarded(premade: Premade) -> None:
    from ignite.engine import Engine, Events
    from ignite.handlers import TerminateOnNan

    engine = Engine(_ignite_step())
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    engine.run(premade, max_epochs=1, epoch_length=premade.plan.total_steps)


def _ignite_step() -> Callable[[Any, Batch], Tensor]:
    model, optimizer = make_model()

    def step(engine: Any, batch: Batch) -> Tensor:
        loss = compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run_tnt(premade: Premade) -> None:
    from torchtnt.framework.state import State
    from torchtnt.framework.train import train
    from torchtnt.framework.unit import TrainUnit

    class Unit(TrainUnit[Batch]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = make_model()

        def train_step(self, state: State, data: Batch) -> None:
            compute_loss(self.model, data).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    train(Unit(), premade, max_steps=premade.plan.total_steps)


def run_accelerate(premade: Premade) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make_model())
    for batch in itertools.islice(premade, premade.plan.total_steps):
        with accelerator.accumulate(model):
            accelerator.backward(compute_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def run_lightning(premade: Premade) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self._sgd = make_model()

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return compute_loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self._sgd

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, barebones=True, max_epochs=1, max_steps=premade.plan.total_steps
    )
    trainer.fit(Module(), premade)


def run_transformers(premade: Premade) -> None:
    from transformers import Trainer, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.sgd = make_model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": compute_loss(self.model, (x, labels))}

    class Lean(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return premade

    premade.as_keywords()
    model = Wrapped()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=premade.plan.total_steps, per_device_train_batch_size=1, use_cpu=True, report_to="none",
            logging_strategy="no", save_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
            lr_scheduler_type="constant", logging_nan_inf_filter=False,
        )  # fmt: skip
        constant = torch.optim.lr_scheduler.ConstantLR(model.sgd, 1.0)
        Lean(model, arguments, train_dataset=[0], optimizers=(model.sgd, constant)).train()


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Args:
        title: What the table calls it.
        package: The distribution that must be installed, none for ours.
        run: Makes the steps of a plan.
    """

    title: str
    package: str | None
    run: Callable[[Premade], None]


CONTENDERS = {
    "bare": Contender("a bare PyTorch loop", None, run_bare),
    "ours": Contender("this Trainer, all default callbacks", None, run_ours),
    "ignite": Contender("ignite, no handler", "pytorch-ignite", run_ignite),
    "ignite_guarded": Contender("ignite, TerminateOnNan", "pytorch-ignite", run_ignite_guarded),
    "tnt": Contender("TNT TrainUnit, no callback", "torchtnt", run_tnt),
    "accelerate": Contender("Accelerate, accumulate", "accelerate", run_accelerate),
    "lightning": Contender("Lightning, barebones", "lightning", run_lightning),
    "transformers": Contender("transformers, nothing on", "transformers", run_transformers),
}


# -- measuring -------------------------------------------------------------------------------------------------------


def contend(name: str, plan: Plan, line: Connection) -> None:
    """The body of a contender's process; what goes wrong is sent as text."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryFile("w+") as chatter:
        os.dup2(chatter.fileno(), 1)
        os.dup2(chatter.fileno(), 2)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            CONTENDERS[name].run(Premade(plan, line))
        except Exception as error:
            line.send(f"{type(error).__name__}: {error}")
            raise


class Running:
    """A contender's process, warm and waiting for its turn when this returns.

    Raises:
        RuntimeError: It could not run; so do its other methods.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=contend, args=(name, plan, theirs))
        self._process.start()
        theirs.close()  # so that the end of the process is seen here
        self.times: list[Time] = []
        self._answer()

    def turn(self) -> None:
        """One round."""
        self._line.send(None)
        self.times.append(self._answer())

    def end(self) -> None:
        """Lets it finish, if it still runs."""
        self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()

    def _answer(self) -> Any:
        try:
            answer = self._line.recv() if self._line.poll(PATIENCE_SECONDS) else "no answer in time"
        except EOFError:
            answer = "its process died"
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def measure(names: list[str], plan: Plan) -> tuple[dict[str, list[Time]], dict[str, str]]:
    """The rounds of one process each by name, and for those without any the reason."""
    running: dict[str, Running] = {}
    failures: dict[str, str] = {}
    for name in names:
        if is_missing(CONTENDERS[name]):
            failures[name] = "not installed"
            continue
        try:
            running[name] = Running(name, plan)
        except RuntimeError as error:
            failures[name] = str(error)
    for _ in range(plan.rounds):
        for name in [name for name in running if name not in failures]:
            try:
                running[name].turn()
            except RuntimeError as error:
                failures[name] = str(error)
    for contender in running.values():
        contender.end()
    return {name: one.times for name, one in running.items() if name not in failures}, failures


def best(times: list[Time]) -> Time:
    return Time(min(time.main for time in times), min(time.every for time in times))


def is_missing(contender: Contender) -> bool:
    return contender.package is not None and _version(contender.package) is None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def loader_cost() -> dict[str, float]:
    """µs of our loader with 0 workers per sample and per batch."""
    import loader_overhead

    return loader_overhead.measure(50_000)["ours"]


def show(times: dict[str, Time], failures: dict[str, str], loader: dict[str, float]) -> None:
    """Prints the table."""
    bare = times["bare"]
    ours = times["ours"].main - bare.main if "ours" in times else None
    print(f"{'µs of CPU a step':<36} {'version':>9} {'main thread':>12} {'added':>8} {'all threads':>12} {'ratio':>7}")
    for name, spent in times.items():
        contender = CONTENDERS[name]
        version = (_version(contender.package) if contender.package else "") or ""
        line = f"{contender.title:<36} {version:>9} {spent.main:12.1f}"
        if name != "bare":
            line += f" {spent.main - bare.main:8.1f} {spent.every - bare.every:12.1f}"
            line += f" {(spent.main - bare.main) / ours:7.2f}" if ours else ""
        print(line)
    for name, reason in failures.items():
        print(f"{CONTENDERS[name].title:<36} left out: {reason}")
    print(
        f"{'our loader apart, 0 workers':<36} {loader['per sample']:.1f} a sample + {loader['per batch']:.1f} a batch "
        "(loader_overhead.py)"
    )
    if ours is not None:
        least = min((spent.main, name) for name, spent in times.items() if name != "bare")[1]
        print(f"ours adds at most {TARGET:g} µs: {'met' if ours <= TARGET else 'MISSED'}")
        print(f"least of all: {CONTENDERS[least].title}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a training loop costs per step.")
    parser.add_argument("--steps", type=int, default=300, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a process")
    parser.add_argument("--processes", type=int, default=3, help="processes of a contender, one after another")
    parser.add_argument("--only", default=",".join(CONTENDERS), help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--json", type=Path, help="where to write the numbers to")
    options = parser.parse_args()
    plan = Plan(options.steps, options.rounds)
    names = list(dict.fromkeys(["bare", *options.only.split(",")]))
    rounds: dict[str, list[Time]] = {}
    failures: dict[str, str] = {}
    for _ in range(options.processes):
        new, failed = measure([name for name in names if name not in failures], plan)
        failures |= failed
        for name, times in new.items():
            rounds.setdefault(name, []).extend(times)
    times = {name: best(rounds[name]) for name in names if name in rounds and name not in failures}
    loader = loader_cost()
    show(times, failures, loader)
    if options.json is not None:
        result = {
            "plan": asdict(plan), "processes": options.processes, "loader": loader, "left_out": failures,
            "loop": {name: asdict(spent) for name, spent in times.items()},
            "python": platform.python_version(), "torch": torch.__version__,
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
