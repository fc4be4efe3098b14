"""What the cases ask of a run: words to start it with, what lies on disk, what MLflow holds.

Guarantee: nothing here changes a run.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

PARTS = "tests.cases.case_parts"
MLFLOW = "callbacks.mlflow={_target_: framework.callbacks.MLflowCallback}"  # the job has it switched off


def part(name: str, key: str = "", **options: Any) -> str:
    """Adds a callback of `case_parts`: `part("SlowDisk", seconds=1)`; its key is the name in small letters, or `key`."""
    given = "".join(f", {option}: {_text(value)}" for option, value in options.items())
    return f"+callbacks.{key or name.lower()}={{_target_: {PARTS}.{name}{given}}}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def tree(folder: Path) -> set[str]:
    """Everything below a folder but what the tests themselves put there."""
    ours = ("output", "configs")
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and path.relative_to(folder).parts[0] not in ours
    }


def state_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and modification time of every file below a folder."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), os.stat(path).st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True, slots=True)
class Logged:
    """One run as MLflow has it.

    Args:
        id: MLflow's id.
        status: FINISHED, FAILED, KILLED or RUNNING.
        params: Parameters.
        tags: Tags.
        points: Number of points by metric.
        artifacts: Folder of its artifacts.
    """

    id: str
    status: str
    params: dict[str, str]
    tags: dict[str, str]
    points: dict[str, int]
    artifacts: Path


def mlflow_runs(root: Path) -> dict[str, list[Logged]]:
    """The runs in the store `root/mlflow.db`, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries below MLflow
        return _mlflow_runs(root / "mlflow.db")


def _mlflow_runs(database: Path) -> dict[str, list[Logged]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database.absolute()}")
    found: dict[str, list[Logged]] = {}
    for run in client.search_runs([one.experiment_id for one in client.search_experiments()]):
        points = {key: len(client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics}
        artifacts = Path(unquote(run.info.artifact_uri.removeprefix("file://")))
        logged = Logged(run.info.run_id, run.info.status, run.data.params, run.data.tags, points, artifacts)
        found.setdefault(run.info.run_name, []).append(logged)
    return found
