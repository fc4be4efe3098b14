"""The copy on a real `mlflow server` on loopback, which goes away and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from goodput_runs import Run, Store, finish, free_port, kill, loss, parent, serve, wait_until

from framework.goodput.tracking.mlflow_run import ExportState

NOTHING = ExportState("", "", "", "")


def stop(server: subprocess.Popen[bytes]) -> None:
    os.killpg(server.pid, signal.SIGKILL)  # its workers are in the session that was made for it
    server.wait(timeout=10)


def sampled(store: Store) -> list[tuple[int, float]]:
    return store.series("system/cpu_utilization_percentage")


def test_what_a_server_misses_while_it_is_away_is_sent_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    database, artifacts = tmp_path / "server.db", tmp_path / "artifacts"
    run, store = Run(tmp_path / "runs", uri=f"http://127.0.0.1:{port}"), Store(database)
    trainer = parent()
    run.start(trainer.pid).steps(1, 20)
    often = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.5"}
    exporter = run.exporter(trainer.pid, "--system-metrics", variables=often)
    assert exporter.stderr is not None
    assert "is not available" in exporter.stderr.readline(), "away at the start"
    server = serve(database, artifacts, port)
    try:
        wait_until(lambda: len(store.series("train/loss")) == 20, 90)
        assert store.status() == "RUNNING"
        wait_until(
            lambda: (ExportState.read(run.directory.mlflow_file) or NOTHING).seq >= 2
        )  # it knows that they arrived
        wait_until(lambda: len(sampled(store)) >= 2)
        time.sleep(1.0)
    finally:
        stop(server)
    before = len(sampled(store))
    run.steps(21, 400)
    assert "is not available" in exporter.stderr.readline(), "away in between"
    server = serve(database, artifacts, port)
    try:
        wait_until(lambda: len(store.series("train/loss")) == 400, 90)
        wait_until(lambda: len(sampled(store)) > before + 1)
        run.end(step=400)
        code, _, rest = finish(exporter)
        assert (code, rest) == (0, "")
    finally:
        stop(server)
        kill(trainer)
    assert store.status() == "FINISHED"
    assert store.series("train/loss") == [(step, loss(step)) for step in range(1, 401)]
    assert store.doubles() == []
    assert store.params()["seed"] == "7"
    assert all(0 <= percent <= 100 for _, percent in sampled(store))
    [report] = artifacts.rglob("report.json")
    assert json.loads(report.read_text())["steps_done"] == 400
    [artifact] = artifacts.rglob("config.yaml")
    assert artifact.read_bytes() == run.directory.config_file.read_bytes()
