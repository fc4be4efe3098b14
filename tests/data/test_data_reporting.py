"""A loader alone reports how long its loop waits for data."""

from __future__ import annotations

import itertools
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from data_sets import Numbers
from test_data_hooks import Counting

from framework.data import DataLoader
from framework.errors import ConfigError


class Slow(Counting):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        time.sleep(0.002)
        return torch.tensor(index)


def test_values_come_every_fifty_batches_and_at_the_end() -> None:
    told: list[tuple[int, dict[str, float]]] = []
    loader = DataLoader(Slow(120), 1, num_workers=0, metrics=lambda values, step: told.append((step, values)))
    assert [len(list(loader)) for _ in range(1)] == [120]
    loader.close()
    loader.close()
    assert [step for step, _ in told] == [50, 100, 120]
    for _, values in told:
        assert values["data/fetch_seconds"] >= 0.002
        assert 0.5 < values["data/fetch_fraction"] <= 1
        assert values["data/cache_hit_rate"] == 1
        assert values["data/read_p95"] == pytest.approx(0.25, rel=0.1)
        assert {"data/bytes_fetched", "data/read_p50", "data/retries", "data/skipped", "data/worker_restarts"} < set(
            values
        )


def test_the_time_of_the_loop_itself_is_not_waiting() -> None:
    told: list[dict[str, float]] = []
    loader = DataLoader(Numbers(50), 1, num_workers=0, metrics=lambda values, step: told.append(values))
    for _ in loader:
        time.sleep(0.005)
    assert len(told) == 1 and told[0]["data/fetch_fraction"] < 0.5
    assert "data/cache_hit_rate" not in told[0]  # no file was asked for


def test_a_function_that_fails_stops_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    def fail(values: dict[str, float], step: int) -> None:
        raise OSError("away")

    loader = DataLoader(Numbers(60), 1, num_workers=1, metrics=fail)
    assert len(list(loader)) == 60
    loader.close()
    assert caplog.messages == ["metrics of the loader could not be reported: OSError: away"] * 2


def test_the_active_mlflow_run_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # made in no time, unlike the tables of a database
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what mlflow imports
        import mlflow

        check_active_run(mlflow, tmp_path)


def check_active_run(mlflow: Any, tmp_path: Path) -> None:
    mlflow.set_tracking_uri(tmp_path.as_uri())
    try:
        mlflow.set_experiment("loading")
        with mlflow.start_run() as run:
            loader = DataLoader(Numbers(70), 1, num_workers=1, metrics="mlflow")
            list(loader)
            loader.close()
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "data/fetch_seconds")
        assert [metric.step for metric in history] == [50, 70]
    finally:
        mlflow.set_tracking_uri(None)


def test_without_a_run_or_a_server_there_is_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    loader = DataLoader(Numbers(120), 1, num_workers=0, metrics="mlflow")
    with caplog.at_level(logging.WARNING):
        assert len(list(itertools.islice(loader, 120))) == 120
        loader.close()
    (told,) = caplog.messages
    assert "there is no active MLflow run" in told
    other = DataLoader(Numbers(120), 1, num_workers=0, metrics="mlflow", rank=1, world_size=2)
    assert len(list(other)) == 60
    assert len(caplog.messages) == 1  # one rank speaks for all
    with pytest.raises(ConfigError, match="metrics='mlfow' is neither 'mlflow' nor a function"):
        DataLoader(Numbers(4), metrics="mlfow")
