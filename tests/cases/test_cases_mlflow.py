"""MLflow: ML-02, ML-05, ML-07, ML-09, ML-11, CL-29. Real stores, real exporters."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_tools import MLFLOW, PARTS, mlflow_runs, tree
from support import kill_at, start

WILD: dict[str, Any] = {
    "long": [1000 + number for number in range(2000)],
    "table": {f"key{number}": number for number in range(300)},
    "deep": {},
    "callbacks[0]": "odd",
    "a+b@c": "odd too",
    "word": "höher – 速い",
    "nothing": None,
}


def wild_config() -> dict[str, Any]:
    """Arguments that MLflow takes neither by name nor by value nor by number."""
    node = WILD["deep"]
    for level in range(12):
        node[f"level_{level:02d}_with_a_rather_long_name"] = node = {}
    node["end"] = 1
    return WILD


def test_ml_05_any_config_is_logged_whole(tmp_path: Path, with_store: Callable[[Path], Path]) -> None:
    """Logging the config as parameters crashes training (long values, list indices, odd characters, many keys)."""
    root = with_store(tmp_path)
    (tmp_path / "configs/recipe").mkdir(parents=True)
    config = {
        "defaults": [{"/recipe": "job"}, "_self_"],
        "recipe": {"_target_": f"{PARTS}.WildJob", "wild": wild_config()},
    }
    job = Path(__file__).parents[1] / "support/jobs/configs/recipe/job.yaml"
    (tmp_path / "configs/recipe/job.yaml").write_text(job.read_text())
    text = "# @package _global_\n" + yaml.safe_dump(config | {"defaults": ["job", "_self_"]}, allow_unicode=True)
    (tmp_path / "configs/recipe/wild.yaml").write_text(text)
    start("+recipe=wild", "run.name=r", "trainer.max_steps=6", "seed=11", MLFLOW, cwd=tmp_path).ends(0)

    (logged,) = mlflow_runs(root)["r"]
    assert logged.status == "FINISHED" and logged.points["train/loss"] == 6
    params = logged.params
    assert {f"recipe.wild.table.key{number}": str(number) for number in range(300)}.items() <= params.items()
    assert params["recipe.wild.word"] == "höher – 速い" and params["recipe.wild.nothing"] in ("null", "None")
    assert params["recipe.wild.callbacks_0_"] == "odd" and params["recipe.wild.a_b_c"] == "odd too"
    assert len(str(WILD["long"])) >= 10_000 and "cut" in params["recipe.wild.long"]
    (deep,) = [key for key in params if "level_11" in key]
    assert len(deep) <= 250 and params[deep] == "1" and params["seed"] == "11"
    note = logged.tags["config.note"]
    assert "renamed" in note and "cut" in note and "config.yaml" in note
    artifact = yaml.safe_load((logged.artifacts / "config.yaml").read_text())
    assert artifact == yaml.safe_load((root / "r/config.yaml").read_text())
    assert artifact["recipe"]["wild"] == WILD and artifact["seed"] == 11


ENDS = {
    "normal": ((), 0, "FINISHED"),
    "error-in-step": ((f"recipe._target_={PARTS}.FailingJob", "recipe.at=6"), 1, "FAILED"),
    "error-in-dataset": ((f"data.train={{_target_: {PARTS}.broken_samples}}", "~data.train.samples"), 1, "FAILED"),
    "sigint": ((kill_at(6, "forward", number="SIGINT"),), 130, "KILLED"),
    "sigterm": ((kill_at(6, "forward", number="SIGTERM"),), 143, "KILLED"),
    "kill-and-rerun": ((kill_at(6, "forward"),), -signal.SIGKILL, "FINISHED"),
}


def test_ml_07_the_status_says_how_the_run_ended(tmp_path: Path, with_store: Callable[[Path], Path]) -> None:
    """Run status is wrong: failed runs look finished, killed runs look live."""
    root = with_store(tmp_path)
    words = ("+recipe=job", "trainer.max_steps=10", MLFLOW)
    runs = {name: start(*words, *end[0], f"run.name={name}", cwd=tmp_path) for name, end in ENDS.items()}
    for name, run in runs.items():
        assert run.wait(120) == [ENDS[name][1]], run.output()
    again = (*words, *ENDS["kill-and-rerun"][0], "run.name=kill-and-rerun")
    start(*again, cwd=tmp_path).ends(0)
    logged = mlflow_runs(root)
    assert {name: [run.status for run in found] for name, found in logged.items()} == {
        name: [status] for name, (_, _, status) in ENDS.items()
    }
    assert logged["kill-and-rerun"][0].points["train/loss"] == 10


CLEAN = {name: "" for name in os.environ if name.startswith("MLFLOW_")}
TOY = ("+recipe=toy", "trainer.max_steps=6")


def test_ml_09_the_default_store_works_and_is_named(tmp_path: Path) -> None:
    """The default local tracking location does not work with current MLflow or depends on the cwd."""
    folder = tmp_path / "my place"
    folder.mkdir()
    run = start(*TOY, cwd=folder, env=CLEAN).ends(0)
    assert "runs/mlflow.db" in run.output()
    (logged,) = mlflow_runs(folder / "runs")["toy"]
    assert logged.status == "FINISHED" and logged.points["train/loss"] == 6
    assert (logged.artifacts / "config.yaml").is_file()
    assert {path.split("/")[0] for path in tree(folder)} == {"runs"}


def test_ml_09_cl_29_a_file_store_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    """The default local tracking location: `file:./mlruns`, which Hydra passes on and MLflow no longer writes."""
    run = start(*TOY, "callbacks.mlflow.tracking_uri=file:./mlruns", cwd=tmp_path).ends(1)
    assert "callbacks.mlflow.tracking_uri=sqlite:////" in run.stderr() and "Traceback" not in run.stderr()
    assert tree(tmp_path) == set()


READ_ONLY = "import os, sys; os.chdir(sys.argv.pop(1)); from framework.train import main; sys.exit(main())"


@pytest.mark.cold
def test_ml_09_a_read_only_folder_is_a_clear_error(tmp_path: Path) -> None:
    """The default local tracking location depends on the cwd: a folder that nobody can write to."""
    program = ("-c", READ_ONLY, "/proc/self")  # even root cannot make anything there
    refused = start(*TOY, cwd=tmp_path, cold=True, program=program).ends(1)
    assert "run.root" in refused.stderr() and "runs/toy" in refused.stderr() and "Traceback" not in refused.stderr()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_ml_02_a_server_out_of_reach_is_a_warning_and_the_training_goes_on(
    tmp_path: Path, with_store: Callable[[Path], Path], kind: str, silent: str
) -> None:
    """The server cannot be reached at start: minutes of silence, then a long traceback."""
    root = with_store(tmp_path)
    address = "http://127.0.0.1:9" if kind == "closed" else silent
    mlflow = (
        f"callbacks.mlflow={{_target_: framework.callbacks.MLflowCallback, tracking_uri: '{address}', linger: 10s}}"
    )
    words = ("+recipe=job", "run.name=r", "trainer.max_steps=40")
    run = start(*words, mlflow, cwd=tmp_path).ends(0)
    assert f"warning: MLflow at {address} is not available" in run.output()
    assert "Traceback" not in run.output()
    again = start(*words, "trainer.max_steps=50", MLFLOW, cwd=tmp_path).ends(0)  # nothing blocks a second try
    assert "not available" not in again.output()
    (logged,) = mlflow_runs(root)["r"]
    assert logged.status == "FINISHED" and logged.points["train/loss"] == 50, "what the first server missed is here too"


ML_11: dict[str, tuple[tuple[str, ...], int, str, int]] = {
    "normal": ((), 0, "FINISHED", 400),
    "error": (("recipe.at=399",), 1, "FAILED", 398),
    "sigterm": ((kill_at(399, "forward", number="SIGTERM"),), 143, "KILLED", 399),
}


@pytest.mark.parametrize("name", ML_11)
def test_ml_11_every_point_is_there_however_the_run_ends(
    tmp_path: Path, with_store: Callable[[Path], Path], name: str
) -> None:
    """Per-step metric calls dominate the step time; or buffered points are lost at the end/crash."""
    root = with_store(tmp_path)
    options, code, status, steps = ML_11[name]
    recipe = f"recipe._target_={PARTS}.FiveMetrics"
    words = ("+recipe=job", "run.name=r", "trainer.max_steps=400", "callbacks.async_checkpoint.every=100", recipe)
    words += ("recipe.step_seconds=0.005",)
    start(*words, MLFLOW, *options, cwd=tmp_path).ends(code, timeout=120)
    (logged,) = mlflow_runs(root)["r"]
    assert logged.status == status
    metrics = [f"train/metric{number}" for number in range(5)]
    assert {logged.points[key] for key in metrics} == {steps}
