"""Sweeps: names, logs, failures, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework import sweep, train
from framework.errors import ConfigError
from framework.journal import Journal
from framework.rundir import RunDirectory
from framework.stepmark import read_mark
from tests.config.helpers import tree

ROOT = Path(train.__file__).parents[1]


def test_each_combination_is_a_run_of_its_own(folder: Path) -> None:
    jobs = sweep.plan(["+recipe=mine", "optimizer.lr=0.1,1e-2", "seed=range(1,3)"])
    assert [job.name for job in jobs] == [
        "mine-optimizer.lr-0.1-seed-1", "mine-optimizer.lr-0.1-seed-2",
        "mine-optimizer.lr-0.01-seed-1", "mine-optimizer.lr-0.01-seed-2",
    ]  # fmt: skip
    assert [job.run_dir for job in jobs] == [Path("runs") / job.name for job in jobs]
    assert jobs[0].words == ("+recipe=mine", "optimizer.lr=0.1", "seed=1", f"run.name={jobs[0].name}")
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", job.name) for job in jobs)


def test_names_stay_safe_distinct_and_short(folder: Path) -> None:
    words = ["+recipe=mine", "data.root='/a b/(1)','/a b/{1}'", "run.root=/x"]
    names = [job.name for job in sweep.plan(words)]
    assert len(set(names)) == 2 and all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
    assert names == [job.name for job in sweep.plan(words)]
    long = sweep.plan(["+recipe=mine", "data.root=" + ",".join(letter * 300 for letter in "ab")])
    assert all(len(job.name) < 150 for job in long) and len({job.name for job in long}) == 2


def test_swept_names_and_recipes_need_no_suffix(folder: Path) -> None:
    assert [job.name for job in sweep.plan(["+recipe=mine", "run.name=1e3,007"])] == ["1e3", "007"]
    assert [job.name for job in sweep.plan(["+recipe=mine,toy"])] == ["mine", "toy"]


def test_jobs_may_not_share_a_directory(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.root"):
        sweep.plan(["+recipe=mine", "seed=1,2", "run.dir=x"])


def test_a_sweep_of_which_nothing_can_start_creates_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(folder)
    assert train.main(["-m", "+recipe=mine", "seed=1,2", "+model.lrr=1"]) == 1
    assert "model.lrr" in capsys.readouterr().err and tree(folder) == before


def test_a_sweep_under_torchrun_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        sweep.run(["+recipe=mine", "seed=1,2"])


FAILING = """
from recipes.toy import Toy


class Failing(Toy):
    def __init__(self, *, fault="none", **rest):
        super().__init__(**rest)
        self.fault = fault

    def train_step(self, model, batch):
        if self.fault == "raises":
            raise LookupError("a fault of the user")
        return super().train_step(model, batch)
"""
CONFIG = """\
# @package _global_
defaults: [/recipe/toy]
recipe: {_target_: recipes.failing.Failing}
trainer: {max_steps: 2, max_epochs: null}
"""


@pytest.fixture
def failing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "recipes" / "failing.py").write_text(FAILING)
    (folder / "configs" / "recipe" / "failing.yaml").write_text(CONFIG)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.mark.cold
def test_failing_jobs_stop_nobody_and_are_all_named(failing: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "-m",
        "+recipe=failing",
        "+recipe.fault=none,raises",
        "trainer.global_batch_size=32,7",
        "trainer.micro_batch_size=16",
    ]
    assert train.main([*words, "~callbacks.mlflow", "~callbacks.progress"]) == 1
    said = capfd.readouterr()
    runs = failing / "runs"
    good, refused, failed, both = (
        f"failing-recipe.fault-{fault}-trainer.global_batch_size-{size}"
        for fault in ("none", "raises")
        for size in (32, 7)
    )
    assert sorted(path.name for path in runs.iterdir()) == sorted([good, refused, failed, both])
    assert list((runs / good / "checkpoints").glob("step_*/.metadata"))
    assert "Traceback" in (runs / failed / "train.log").read_text()
    assert "LookupError: a fault of the user" in (runs / failed / "train.log").read_text()
    assert "trainer.global_batch_size=7" in (runs / refused / "train.log").read_text()
    summary = said.out[said.out.index("sweep:") :]
    assert "1 of 4 jobs done" in summary and f"failed: {good}" not in summary
    for name in (refused, failed, both):
        assert f"failed: {name}: exit code 1" in summary
    assert "LookupError: a fault of the user" in summary


def test_the_summary_has_the_last_metrics_of_each_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        sweep.Job((), name, folder / "runs" / name, exit_code=code) for name, code in (("a", 0), ("b", 0), ("c", 1))
    ]
    for job, best in zip(jobs[:2], (0.9, 0.875), strict=True):
        for attempt in (1, 2):
            journal = Journal(job.run_dir / "events" / f"att-{attempt:04d}" / "rank0.jsonl", attempt)
            journal.event(
                "metrics", step=10 * attempt, values={"eval/top1": best - 0.5 / attempt**2, "eval/loss": None}
            )
            journal.close()
    jobs[2].run_dir.mkdir(parents=True)
    jobs[2].log.write_text("error: no\n")
    sweep._summarise(jobs)
    said = capsys.readouterr().out.splitlines()
    assert said[1:3] == [
        "  a: eval/top1 0.775, eval/loss None (step 20)",
        "  b: eval/top1 0.75, eval/loss None (step 20)",
    ]
    assert said[3].startswith("  failed: c") and len(said) == 4


@pytest.mark.cold
def test_a_signal_reaches_the_job_once_and_ends_the_sweep(failing: Path) -> None:
    words = ["+recipe=failing", "seed=1,2", "trainer.max_steps=100000", "recipe.step_seconds=0.05", "~callbacks.mlflow"]
    command = [sys.executable, "-m", "framework.train", "-m", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ.copy()
    )
    try:
        mark = RunDirectory(failing / "runs" / "failing-seed-1").mark_file(1)
        deadline = time.monotonic() + 90
        while read_mark(mark) is None:  # before the first step there is nothing to save
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, out
    assert "not started: failing-seed-2" in out
    assert list((failing / "runs" / "failing-seed-1" / "checkpoints").glob("step_*/.metadata"))
