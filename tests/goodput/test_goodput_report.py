"""The report of a run, as a user calls it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from goodput_runs import Run
from goodput_story import Story

from framework.goodput.__main__ import main
from framework.goodput.accounts.timeline import CATEGORIES
from framework.goodput.reporting.report import build, remarks, summary_line
from framework.goodput.reporting.words import duration
from framework.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """40 steps of 1 s in two attempts: 5 done twice, 60 s down."""
    story = Story().start(init=8).train(30, productive=1.0, data_wait=0.5).commit(0.1, 3).train(5, productive=1.0)
    story.event("failure", type="RuntimeError", message="boom [red]x[/red]", step=35).end("failed", 1)
    story.wait(60).start(init=4, restored=30, restore_seconds=1).train(10, productive=1.0).commit().end()
    for attempt in (1, 2):
        folder = tmp_path / f"toy/events/att-{attempt:04d}"
        folder.mkdir(parents=True)
        lines = [json.dumps(event) for event in story.events if event["att"] == attempt]
        (folder / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "toy"


def test_report_shows_times_attempts_checkpoints_and_what_to_do(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "goodput 30.1%", "40 steps done, 5 done twice, 2 attempts", "2 checkpoints committed; the newest at step 40",
        "failed RuntimeError: boom [red]x[/red]", "1 - 35", "31 - 40", "1. down: 1 min 00 s (45.1%)", "the scheduler",
        "2. data_wait: 15.0 s", "loader.num_workers", "wall clock", "100.0%",
    ):  # fmt: skip
        assert words in shown


def test_one_attempt_and_one_checkpoint_are_told_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story().start(init=8).train(1, productive=1.0).commit().end()
    (tmp_path / "one/events/att-0001").mkdir(parents=True)
    lines = [json.dumps(event) for event in story.events]
    (tmp_path / "one/events/att-0001/rank0.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(tmp_path / "one")]) == 0
    shown = capsys.readouterr().out
    assert "1 step done, 0 done twice, 1 attempt\n" in shown and "1 checkpoint committed; the newest" in shown
    assert " 1 step " in summary_line(tmp_path / "one")


def test_json_sums_to_the_wall_clock(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values["seconds"]) == set(CATEGORIES)
    assert sum(values["seconds"].values()) == pytest.approx(values["wall"], abs=1e-3)
    assert (values["steps_done"], values["steps_lost"], values["attempts"]) == (40, 5, 2)
    assert [line["ended"] for line in values["history"]] == ["failed", "finished"]


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_wrong_path_is_one_line_and_exit_1(kind: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / kind
    if kind == "empty":
        path.mkdir()
    if kind == "file":
        path.write_text("x")
    assert main(["report", str(path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert str(path) in shown.err
    assert str(run) in shown.err, "the run beside it is named"


def test_the_summary_is_one_line_with_the_place_of_the_run(run: Path) -> None:
    line = summary_line(RunDirectory(run))
    assert "\n" not in line
    for words in (
        "goodput 30.1% of 2 min 13 s",
        "down 45.1%",
        "40 steps (5 done twice)",
        "checkpoint at step 40",
        str(run),
    ):
        assert words in line
    assert summary_line(run / "nothing").startswith("goodput was not measured")


def test_a_run_whose_steps_were_not_measured_is_told_which_callback_is_off(run: Path) -> None:
    report = build(run)
    goodput = dataclasses.replace(report.goodput, is_measured=False)
    named = re.findall(r"callbacks\.(\w+)", " ".join(remarks(dataclasses.replace(report, goodput=goodput))))
    defaults = yaml.safe_load((Path(__file__).parents[2] / "configs/callbacks/default.yaml").read_text())
    assert named == ["goodput"] and set(named) <= set(defaults)


def test_a_live_run_is_reported_up_to_now(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lease = run.directory.acquire()
    try:
        run.start(1).steps(1, 20)
        report = build(run.path)
        assert (report.is_live, report.attempts[0].ended) == (True, "running")
        assert report.goodput.wall == pytest.approx(time.time() - report.goodput.started, abs=2)
    finally:
        lease.release()
        run.journal.close()
    assert build(run.path).attempts[0].ended == "killed"


def test_a_lease_renewed_after_the_last_event_is_a_sign_of_life(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start(1).steps(1, 20).journal.close()
    before = build(run.path).goodput.wall
    owner = {
        "host": "elsewhere",
        "pid": 1,
        "started": 0.0,
        "attempt": 1,
        "token": "x",
        "renewed": time.time() + 8 - 100,
    }
    run.directory.owner_file.write_text(json.dumps(owner | {"renewed": time.time() + 8}))
    ahead = build(run.path)
    assert ahead.is_live
    run.directory.owner_file.write_text(json.dumps(owner))
    assert build(run.path).goodput.wall == pytest.approx(before, abs=0.5)


@pytest.mark.cold
def test_help_needs_neither_torch_nor_mlflow_nor_rich() -> None:
    code = (
        "import sys, runpy\nsys.argv = ['goodput', '--help']\n"
        "try: runpy.run_module('framework.goodput', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert end.code == 0\n"
        "import framework.goodput.tracking.exporter_process, framework.goodput.reporting.report, framework.goodput.tracking.exporter\n"
        "print([m for m in ('torch', 'mlflow', 'rich', 'numpy', 'yaml') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "report" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.21, "0.2 s"), (59.94, "59.9 s"), (60, "1 min 00 s"), (3725, "1 h 02 min"), (2 * 86400 + 4 * 3600, "2 d 04 h")],
)
def test_durations_read_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words
