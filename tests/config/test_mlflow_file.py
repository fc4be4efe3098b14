"""A damaged mlflow.json: the MLflow run is found again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from framework.goodput.tracking.mlflow_run import ExportState, MlflowRun
from framework.goodput.tracking.names import default_uri
from framework.journal import Journal
from framework.rundir import RunDirectory


def started(folder: Path, name: str, began: float) -> RunDirectory:
    run = RunDirectory(folder / name)
    journal = Journal(run.events_file(1, 0), 1)
    journal.event("attempt_start", attempt=1, started=began, pid=7)
    journal.close()
    return run


@pytest.mark.filterwarnings("ignore")  # MLflow's own, about its dependencies
def test_a_damaged_file_is_named_and_makes_no_second_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, uri = started(tmp_path, "a", 1.5), default_uri(tmp_path)
    first = MlflowRun(run, uri, "tests", "toy")
    first.connect()
    first.advance(1, 12)
    assert caplog.records == [] or all(record.levelno < logging.WARNING for record in caplog.records)
    for damage in ("{", "[]", '{"version": 1}', ""):
        run.mlflow_file.write_text(damage)
        caplog.clear()
        again = MlflowRun(run, uri, "tests", "toy")
        assert f"{run.mlflow_file} cannot be read" in caplog.text
        assert again.state.cursor == (0, -1), "everything is sent again"
        again.connect()
        assert again.state.run_id == first.state.run_id
        assert ExportState.read(run.mlflow_file) == again.state


def test_two_runs_of_one_name_stay_two(tmp_path: Path) -> None:
    uri = default_uri(tmp_path)
    one, two = (
        MlflowRun(started(tmp_path, name, time), uri, "tests", "toy") for name, time in (("a", 1.5), ("b", 2.5))
    )
    assert one.state.key != two.state.key
