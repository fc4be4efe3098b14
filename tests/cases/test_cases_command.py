"""Command lines as users type them: CL-01, CL-02, CL-03, CL-06, CL-08, CL-09, CL-18."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from case_tools import part, tree
from support import kept, start

CONSTANT = ("schedule._target_=framework.schedules.constant", "~schedule.warmup")


@pytest.mark.parametrize(
    ("typed", "value"), [("1e-3", 0.001), ("1E-3", 0.001), ("1.e-3", 0.001), (".5", 0.5)]
)  # fmt: skip
def test_cl_01_a_rate_is_the_number_that_was_typed(typed: str, value: float, tmp_path: Path) -> None:
    """`optimizer.lr=1e-3` becomes text, or another number, on the way from the command line to the first step."""
    start("+recipe=job", f"optimizer.lr={typed}", *CONSTANT, "trainer.max_steps=2", "run.name=r", cwd=tmp_path).ends(0)
    run = tmp_path / "runs/r"
    saved = yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"]
    assert kept(run)[1].lr == value.hex()
    assert type(saved) is float and saved == value


@pytest.mark.parametrize("typed", ["1e-3", "1E-3", "1.e-3"])
def test_cl_01_a_rate_in_a_file_is_the_same_number(typed: str, tmp_path: Path) -> None:
    """`lr: 1e-3` in a YAML file is text for some readers."""
    (tmp_path / "configs/recipe").mkdir(parents=True)
    job = (Path(__file__).parents[1] / "support/jobs/configs/recipe/job.yaml").read_text()
    (tmp_path / "configs/recipe/job.yaml").write_text(job.replace("lr: 0.01", f"lr: {typed}"))
    start("+recipe=job", *CONSTANT, "trainer.max_steps=2", "run.name=r", cwd=tmp_path).ends(0)
    saved = yaml.safe_load((tmp_path / "runs/r/config.yaml").read_text())["optimizer"]["lr"]
    assert kept(tmp_path / "runs/r")[1].lr == (0.001).hex()
    assert type(saved) is float and saved == 0.001


def refused(folder: Path, *words: str) -> str:
    """Runs a command that must fail with a message alone and leave nothing behind; returns the message."""
    run = start(*words, cwd=folder).ends(1)
    assert "Traceback" not in run.stderr() and run.stderr().startswith("error: ")
    assert tree(folder) == set()
    return run.stderr()


def test_cl_01_a_negative_rate_is_refused(tmp_path: Path) -> None:
    """`optimizer.lr=-1e-3` trains away from the goal."""
    assert "optimizer.lr=-0.001" in refused(tmp_path, "+recipe=job", "optimizer.lr=-1e-3")


def test_cl_02_a_recipe_without_a_plus_shows_the_right_command(tmp_path: Path) -> None:
    """`recipe=job` without the plus."""
    told = refused(tmp_path, "recipe=job", "trainer.max_steps=3")
    assert "python -m framework.train +recipe=job trainer.max_steps=3" in told.splitlines()[0]


def test_cl_03_an_unknown_recipe_shows_those_there_are(tmp_path: Path) -> None:
    """`+recipe=imagenet_resnett`."""
    told = refused(tmp_path, "+recipe=imagenet_resnett")
    assert "imagenet_resnett" in told and "job, job_two" in told and "imagenet_resnet, toy" in told


def test_cl_06_a_sweep_without_its_flag_is_named(tmp_path: Path) -> None:
    """`optimizer.lr=0.1,0.2` and -m forgotten."""
    told = refused(tmp_path, "+recipe=job", "optimizer.lr=0.1,0.2")
    assert "optimizer.lr=0.1,0.2 gives several values" in told and "-m" in told


def test_cl_08_a_callback_given_as_a_mapping_joins_the_others(tmp_path: Path) -> None:
    """`'+callbacks.mine={_target_: my.Cb, every: 5}'`: other callbacks replaced, or arguments of Hydra's own types."""
    mine = part("Arguments", "mine", every=5, names="[a, b]", table="{x: 1}", share=0.5, text="abc")
    start("+recipe=job", mine, "trainer.max_steps=2", "run.name=r", cwd=tmp_path).ends(0)
    told = json.loads((tmp_path / "runs/r/arguments.json").read_text())
    assert told["types"] == {"every": "int", "names": "list", "table": "dict", "share": "float", "text": "str"}
    default = [
        "auto_resume",
        "rng_state",
        "data_position",
        "async_checkpoint",
        "goodput",
        "data_meter",
        "progress",
        "preemption",
    ]
    assert told["order"] == [*default, "non_finite", "ids", "mine"]


def test_cl_09_both_ways_to_set_an_option_are_the_same(tmp_path: Path) -> None:
    """`callbacks.async_checkpoint.every=50` and `'callbacks.async_checkpoint={every: 50}'`: one drops the other keys."""
    for name, word in {
        "dotted": "callbacks.async_checkpoint.every=50",
        "mapping": "callbacks.async_checkpoint={every: 50}",
    }.items():
        start("+recipe=job", word, part("Saved"), "trainer.max_steps=110", f"run.name={name}", cwd=tmp_path).ends(0)
        assert (tmp_path / "runs" / name / "saved").read_text().split() == ["50", "100", "110"]
    configs = [yaml.safe_load((tmp_path / "runs" / name / "config.yaml").read_text()) for name in ("dotted", "mapping")]
    assert configs[0]["callbacks"] == configs[1]["callbacks"]
    assert configs[0]["callbacks"]["async_checkpoint"]["keep"] == 3


@pytest.mark.parametrize("name", ["2024_01_02", "true", "007", "1e3"])
def test_cl_18_a_run_is_called_what_was_typed(name: str, tmp_path: Path) -> None:
    """`run.name=2024_01_02` becomes the number 20240102."""
    start("+recipe=job", f"run.name={name}", "trainer.max_steps=1", cwd=tmp_path).ends(0)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [name]
    assert yaml.safe_load((tmp_path / "runs" / name / "config.yaml").read_text())["run"]["name"] == name
