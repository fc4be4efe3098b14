"""Runs for the exporter's tests: real journals, a real store, a parent process to die, and what the store holds."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from framework.journal import Journal
from framework.rundir import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = "model:\n  _target_: torch.nn.Linear\nseed: 7\ntrainer:\n  max_steps: 40\n"


TABLES = Path()  # an sqlite store without runs, set once a session: making one takes a second and more
_started: list[subprocess.Popen[Any]] = []
AnyPopen = TypeVar("AnyPopen", bound="subprocess.Popen[Any]")


def started(process: AnyPopen) -> AnyPopen:
    """Notes a process so that it ends with the test that started it, however that ends."""
    _started.append(process)
    return process


def end_all() -> None:
    """Ends the processes of a test."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # a server is the leader of its session, with its workers
                os.killpg(process.pid, signal.SIGKILL) if os.getpgid(process.pid) == process.pid else process.kill()
        process.wait(timeout=10)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


class Run:
    """A run directory whose journal the test writes.

    Args:
        root: Folder of all runs; the store is there too unless `uri` says otherwise.
        uri: Tracking URI.
        is_fresh: Whether the store's tables are still to be made.
        config: Content of `config.yaml`.
    """

    def __init__(
        self, root: Path, uri: str | None = None, config: str = CONFIG, name: str = "toy", is_fresh: bool = False
    ) -> None:
        self.directory = RunDirectory(root / name)
        self.path = self.directory.path
        self.database = root / "mlflow.db"
        self.uri = uri or f"sqlite:///{self.database}"
        self.path.mkdir(parents=True, exist_ok=True)
        self.directory.config_file.write_text(config)
        self.attempt = 0
        self.journal: Journal
        if uri is None and not is_fresh and TABLES.is_file():
            self.database.exists() or shutil.copy(TABLES, self.database)

    def start(self, pid: int, step: int = 0, **more: Any) -> Run:
        self.attempt += 1
        self.journal = Journal(self.directory.events_file(self.attempt, 0), self.attempt)
        fields = {"host": "here", "pid": pid, "started": time.time() - 1, "world_size": 2, "versions": {"torch": "2"}}
        fields |= more
        self.journal.event(
            "attempt_start", attempt=self.attempt, boot_id="b", command=["train", "+recipe=toy"], **fields
        )
        if step:
            self.journal.event("restored", step=step, seconds=0.1)
        self.journal.event("train_start", step=step, total_steps=40, resumed=step > 0)
        return self

    def steps(self, first: int, last: int, block: int = 20) -> Run:
        for begin in range(first, last + 1, block):
            numbers = range(begin, min(begin + block, last + 1))
            self.journal.event(
                "steps",
                first=begin,
                start=time.time() - 0.001 * len(numbers),
                seconds={"data_wait": [0.0002] * len(numbers), "productive": [0.0008] * len(numbers)},
                loss=[loss(step) for step in numbers],
                lr=[0.1 / step for step in numbers],
                metrics={"top1": [step / 1000 if step % 2 else None for step in numbers]},
            )
        return self

    def commit(self, step: int) -> Run:
        fields = {"stall_seconds": 0.25, "persist_seconds": 1.5, "captured": time.time() - 2}
        self.journal.event("save_committed", step=step, path=f"checkpoints/step_{step:010d}", **fields)
        return self

    def end(self, status: str = "finished", exit_code: int = 0, step: int = 40) -> Run:
        self.journal.event("end", durable=True, status=status, exit_code=exit_code, step=step, reason=status)
        self.journal.close()
        return self

    def exporter(
        self, parent: int, *options: str, variables: dict[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "framework.goodput.tracking.exporter", str(self.path), "--uri", self.uri]
        command += ["--experiment", "tests", "--run-name", "toy run", "--parent-pid", str(parent), *options]
        environment = clean_environment() | (variables or {})
        pipe = subprocess.PIPE
        popen.setdefault("cwd", self.path)
        return started(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, **popen))


def clean_environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    return kept | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def loss(step: int) -> float:
    return 1.0 / step


def finish(process: subprocess.Popen[str], timeout: float = 60.0) -> tuple[int, str, str]:
    """Waits for a process: exit code, stdout, stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def parent() -> subprocess.Popen[bytes]:
    """A process to stand for the trainer."""
    return started(subprocess.Popen(["sleep", "300"]))


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait(timeout=10)


def wait_until(condition: Callable[[], Any], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serve(database: Path, artifacts: Path, port: int) -> subprocess.Popen[bytes]:
    """Starts a real tracking server on loopback and waits until it answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(artifacts)]
    environment = clean_environment() | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    null = subprocess.DEVNULL
    server = started(
        subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, env=environment, cwd=database.parent, start_new_session=True
        )
    )

    def answers() -> bool:
        assert server.poll() is None, "mlflow server ended"
        with socket.socket() as client:
            client.settimeout(1)
            return client.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, 90)
    return server


class Store:
    """What an sqlite store holds, read without MLflow."""

    def __init__(self, database: Path) -> None:
        self.database = database

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        if not self.database.exists():
            return []
        connection = sqlite3.connect(self.database, timeout=30)
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # no tables yet
            return []
        finally:
            connection.close()

    def runs(self) -> list[tuple[str, str, str]]:
        """Id, name and status of each run."""
        return self.rows("select run_uuid, name, status from runs")

    def status(self) -> str | None:
        """Status of the only run, none if there is none yet."""
        runs = self.runs()
        assert len(runs) <= 1, "more than one MLflow run"
        return runs[0][2] if runs else None

    def series(self, key: str) -> list[tuple[int, float]]:
        return self.rows(f"select step, value from metrics where key = '{key}' order by step, timestamp")

    def doubles(self) -> list[tuple[Any, ...]]:
        return self.rows("select key, step, count(*) from metrics group by key, step, run_uuid having count(*) > 1")

    def tags(self) -> dict[str, str]:
        return dict(self.rows("select key, value from tags"))

    def params(self) -> dict[str, str]:
        return dict(self.rows("select key, value from params"))


def make_tables(database: Path) -> None:
    """Makes an empty store."""
    code = f"from mlflow import MlflowClient; MlflowClient('sqlite:///{database}').search_experiments()"
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=clean_environment(), cwd=database.parent)
