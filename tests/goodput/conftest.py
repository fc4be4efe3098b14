"""Ends what a test of this folder has started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import goodput_runs
import pytest


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without runs, for `Run` to copy."""
    goodput_runs.TABLES = tmp_path_factory.mktemp("store") / "mlflow.db"
    goodput_runs.make_tables(goodput_runs.TABLES)
    return goodput_runs.TABLES


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    goodput_runs.end_all()
