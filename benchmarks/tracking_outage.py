"""What MLflow costs the steps of a run: server up, slow, away, killed and restarted, beside the same run without it.

    python benchmarks/tracking_outage.py [--steps 1000] [--rounds 3] [--json result.json]

Every run is a process of its own with the same small model, about 5 ms of computing a step and five metrics; a real
`mlflow server` on loopback, with its own sqlite file, is what they are copied to. Slow: every answer of the server is
held back for a second by a proxy. Away: nobody listens. Restarted: the server is killed after a third of the steps and
started again after two. The kinds take turns, so that the noise of the machine is shared; step times are those of the
journal, without the first steps. The ratio is to the run without MLflow of the same round. After each run whose server
can be reached, what its store holds is compared with the journal: every loss once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from framework import Recipe, StepOutput

KINDS = ("without", "up", "slow", "away", "restarted")
SKIP = 50  # steps that are not counted: what the start costs is no matter of tracking
DELAY_SECONDS = 1.0
PATIENCE_SECONDS = 300.0
WIDTH = 256


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Numbers to fit."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), index % 7 / 7), torch.tensor(index % 7 / 7)


class Steady(Recipe):
    """About 5 ms of computing a step, and five metrics."""

    def train_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> StepOutput:
        values, target = batch
        loss = nn.functional.mse_loss(model(values).squeeze(1), target)
        return StepOutput(loss, metrics={f"metric{number}": loss.detach() * number for number in range(5)})


def network() -> nn.Module:
    layers = [layer for _ in range(10) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def train(root: Path, name: str, uri: str, steps: int) -> None:
    """One run, in this process."""
    from framework import Trainer
    from framework.callbacks import MLflowCallback, default_callbacks
    from framework.settings import RunSettings, TrainerSettings

    torch.set_num_threads(1)
    callbacks = default_callbacks()
    del callbacks["mlflow"]
    if uri:
        callbacks["mlflow"] = MLflowCallback(uri, "outage", linger="5s" if name.startswith("away") else "120s")
    recipe = Steady(model=network, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), train_data=Points)
    settings = TrainerSettings(max_steps=steps, global_batch_size=32, eval_at_end=False)
    Trainer(recipe, trainer=settings, run=RunSettings(name=name, root=str(root)), callbacks=callbacks).fit()


class Server:
    """A real tracking server on loopback."""

    def __init__(self, folder: Path) -> None:
        self.port, self.database = free_port(), folder / "server.db"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=null, stderr=null, cwd=self._folder, start_new_session=True)

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.2)
        raise SystemExit("mlflow server did not start")

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def losses(self, name: str) -> list[tuple[int, float]]:
        query = (
            "select step, value from metrics m join runs r using (run_uuid) where r.name = ? and m.key = 'train/loss' "
            "order by step"
        )
        with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as connection:
            return connection.execute(query, (name,)).fetchall()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def slow_proxy(port: int) -> int:
    """Holds back every answer of the server at `port`. Returns its own port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(seconds)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for pair in ((client, server, 0.0), (server, client, DELAY_SECONDS)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def journal(root: Path, name: str) -> Iterator[dict[str, Any]]:
    from framework.journal import read_run

    return (event for event in read_run(root / name / "events") if event["ev"] == "steps")


def step_seconds(root: Path, name: str) -> list[float]:
    """How long each step took, waits included."""
    found: list[float] = []
    for event in journal(root, name):
        found += [sum(column) for column in zip(*event["seconds"].values(), strict=True)]
    return found[SKIP:]


def newest_step(root: Path, name: str) -> int:
    return max((event["first"] + len(event["loss"]) - 1 for event in journal(root, name)), default=0)


def run(root: Path, kind: str, number: int, steps: int, server: Server, slow: int) -> dict[str, float]:
    """Trains once; returns step times in milliseconds."""
    name, away = f"{kind}{number}", free_port()
    port = {"without": 0, "slow": slow, "away": away}.get(kind, server.port)
    uri = f"http://127.0.0.1:{port}" if port else ""
    command = [sys.executable, __file__, "--train", str(root), name, uri, "--steps", str(steps)]
    with (root / f"{name}.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
    if kind == "restarted":
        for share, act in ((1 / 3, server.kill), (2 / 3, server.start)):
            while child.poll() is None and newest_step(root, name) < share * steps:
                time.sleep(0.1)
            act()
    if child.wait(PATIENCE_SECONDS) != 0:
        raise SystemExit((root / f"{name}.log").read_text())
    if kind == "restarted":
        server.wait()
    if kind not in ("without", "away"):
        want = [(e["first"] + i, loss) for e in journal(root, name) for i, loss in enumerate(e["loss"])]
        if server.losses(name) != want:
            raise SystemExit(f"{name}: {len(server.losses(name))} points in MLflow, {len(want)} in the journal")
    times = sorted(1000 * value for value in step_seconds(root, name))
    return {"median": median(times), "p99": times[int(0.99 * len(times))], "mean": sum(times) / len(times)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        root, name, uri = arguments.train
        return train(Path(root), name, uri, arguments.steps)
    os.environ |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        server.start()
        try:
            server.wait()
            slow = slow_proxy(server.port)
            for number in range(arguments.rounds):
                for kind in KINDS:
                    results[kind].append(run(Path(folder), kind, number, arguments.steps, server, slow))
        finally:
            server.kill()
    show(results, arguments.json)


def show(results: dict[str, list[dict[str, float]]], file: Path | None) -> None:
    """One line a kind: the median over the rounds of its step times, and of their ratio to those without MLflow."""
    print(
        f"{'MLflow':<10} {'median ms':>10} {'p99 ms':>8} {'mean ms':>8} {'median ratio (all rounds)':>32} {'p99 ratio':>10}"
    )
    table = {}
    for kind, rounds in results.items():
        base = results["without"]
        ratios = {
            key: [one[key] / other[key] for one, other in zip(rounds, base, strict=True)] for key in ("median", "p99")
        }
        row = {key: median(one[key] for one in rounds) for key in ("median", "p99", "mean")}
        every = " ".join(f"{ratio:.3f}" for ratio in ratios["median"])
        print(
            f"{kind:<10} {row['median']:>10.3f} {row['p99']:>8.3f} {row['mean']:>8.3f} "
            f"{median(ratios['median']):>9.3f} ({every}) {median(ratios['p99']):>9.3f}"
        )
        table[kind] = row | {"ratios": ratios}
    if file is not None:
        file.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
