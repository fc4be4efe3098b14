"""Fixtures of the cases."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from case_tools import mlflow_runs


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with tables and no runs: making the tables takes longer than a run."""
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow_runs(database.parent)
    return database


@pytest.fixture
def with_store(empty_store: Path) -> Callable[[Path], Path]:
    """`with_store(folder)` puts an empty store where runs below `folder/runs` look for it; returns `folder/runs`."""

    def copy(folder: Path) -> Path:
        (folder / "runs").mkdir(exist_ok=True)
        shutil.copy(empty_store, folder / "runs" / "mlflow.db")
        return folder / "runs"

    return copy
