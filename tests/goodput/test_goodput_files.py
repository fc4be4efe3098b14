"""Metrics as CSV and for TensorBoard: a function of the journal, whatever is killed when."""

from __future__ import annotations

import csv
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from goodput_runs import Run, clean_environment, finish, kill, loss, parent, started, wait_until
from goodput_story import Story
from hypothesis import given, settings
from hypothesis import strategies as st
from test_goodput_accounting import acts, perform
from test_goodput_points import points

from framework.errors import ConfigError
from framework.goodput.__main__ import main
from framework.goodput.tracking.csv_table import CsvTable
from framework.goodput.tracking.points import Point, PointMaker


def rows(file: Path) -> dict[int, dict[str, float]]:
    """The table: values by column, by step."""
    with file.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert all(None not in row and None not in row.values() for row in found), "a torn row"
    steps = [int(row.pop("step")) for row in found]
    assert steps == sorted(set(steps)), "a step twice, or out of order"
    return {
        step: {key: float(value) for key, value in row.items() if value} for step, row in zip(steps, found, strict=True)
    }


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def follower(run: Run, attempt: int, trainer: int, *sink: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "framework.goodput.tracking.follower", str(run.path), *sink]
    command += ["--parent-pid", str(trainer), "--attempt", str(attempt)]
    pipe = subprocess.PIPE
    return started(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=clean_environment()))


def losses(file: Path) -> list[tuple[int, float]]:
    if not file.exists():
        return []
    return [(step, row["train/loss"]) for step, row in rows(file).items() if "train/loss" in row]


@settings(max_examples=60, deadline=None)
@given(st.lists(acts, max_size=20), st.randoms(use_true_random=False))
def test_the_table_holds_every_point_once_whenever_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[Any, ...]], chance: random.Random
) -> None:
    story = Story()
    story.attempt = 1
    for act in script:
        perform(story, act)
    file, maker = tmp_path_factory.mktemp("table") / "metrics.csv", PointMaker()
    table = CsvTable(file)
    table.publish()
    for event in story.events:
        table.add(maker.feed(event).points, int(event["first"]) - 1 if event["ev"] == "steps" else -1)
        if chance.random() < 0.3:
            table._replace_at = 0.0
            table.flush()
            rows(file)
    table.add(maker.rest(), -1)
    table.close()
    want: dict[int, dict[str, float]] = {}
    for point in points(story.events):
        want.setdefault(point.step, {})[point.key] = point.value
    assert rows(file) == want


def test_a_column_that_appears_later_and_a_value_that_comes_late_find_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "new folder/metrics.csv"
    table = CsvTable(file)
    table.publish()
    assert file.read_text() == "step\n"
    table.add([Point("a", 1.5, 1, 0), Point("a", 2.5, 2, 0)], 2)
    table.flush()
    assert file.read_text() == "step,a\n1,1.5\n2,2.5\n"
    table.add([Point('b,"c"', float("nan"), 3, 0), Point("late", 9.0, 1, 0), Point("a", 4.0, 4, 0)], 3)
    table.flush()
    assert file.read_text().splitlines()[-1] == "3,,nan,", "the row of step 4 is not complete yet"
    table.close()
    assert file.read_text() == 'step,a,"b,""c""",late\n1,1.5,,9.0\n2,2.5,,\n3,,nan,\n4,4.0,,\n'
    assert [path.name for path in file.parent.iterdir()] == ["metrics.csv"]


def test_a_table_that_somebody_else_changed_is_not_written_on(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "metrics.csv")
    table.add([Point("a", 1.0, 1, 0)], 1)
    table.publish()
    with (tmp_path / "metrics.csv").open("a") as stream:
        stream.write("2,")
    table.add([Point("a", 2.0, 2, 0)], 2)
    with pytest.raises(OSError, match="somebody else"):
        table.flush()


def test_the_table_of_a_live_run_survives_kills_of_its_writer_and_of_the_run(tmp_path: Path) -> None:
    run, file = Run(tmp_path), tmp_path / "metrics.csv"
    trainer = parent()
    run.start(trainer.pid).steps(1, 400)
    for last in (440, 480):
        writer = follower(run, 1, trainer.pid, "--csv", str(file))
        wait_until(lambda last=last: len(losses(file)) >= last - 60)  # type: ignore[misc]
        run.steps(last - 39, last)
        kill(writer)
        losses(file)
    writer = follower(run, 1, trainer.pid, "--csv", str(file))
    wait_until(lambda: len(losses(file)) >= 460)
    kill(trainer)
    assert finish(writer) == (0, "", "")
    assert losses(file) == [(step, loss(step)) for step in range(1, 481)]

    trainer = parent()
    run.start(trainer.pid, step=430).steps(431, 500)  # 431 to 480 once more
    run.journal.event("metrics", step=480, values={"eval/top1": 0.5})
    run.end(step=500)
    assert finish(follower(run, 2, trainer.pid, "--csv", str(file))) == (0, "", "")
    kill(trainer)
    assert losses(file) == [(step, loss(step)) for step in range(1, 501)]
    assert rows(file)[480]["eval/top1"] == 0.5


def test_tensorboard_shows_each_step_once_after_kills_and_restarts(tmp_path: Path) -> None:
    run, folder = Run(tmp_path), tmp_path / "board"
    trainer = parent()
    run.start(trainer.pid).steps(1, 400)
    writer = follower(run, 1, trainer.pid, "--tensorboard", str(folder))
    wait_until(lambda: folder.exists() and len(curves(folder).get("train/loss", [])) == 400)
    kill(writer)
    kill(trainer)
    trainer = parent()
    run.start(trainer.pid, step=380).steps(381, 420)
    writer = follower(run, 2, trainer.pid, "--tensorboard", str(folder))
    wait_until(lambda: len(list(folder.glob("events.*"))) == 1 and len(curves(folder)["train/loss"]) == 420)
    run.steps(421, 440).end(step=440)
    assert finish(writer) == (0, "", "")
    kill(trainer)
    found = curves(folder)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 441))
    assert found["train/loss"][9][1] == pytest.approx(loss(10))
    for tag, values in found.items():
        assert max(Counter(step for step, _ in values).values()) == 1, tag
    assert found["goodput/lost_seconds"][-1][1] > 0


def test_a_disk_that_is_full_costs_one_line_and_the_table_is_made_later(tmp_path: Path) -> None:
    run = Run(tmp_path).start(os.getpid()).steps(1, 40)
    writer = follower(run, 1, os.getpid(), "--csv", "/dev/full/metrics.csv")
    assert writer.stderr is not None
    line = writer.stderr.readline()
    assert line.startswith("warning: /dev/full/metrics.csv cannot be kept up") and "--csv FILE" in line
    kill(writer)
    assert writer.communicate()[1] == ""
    run.end()
    file = tmp_path / "out/metrics.csv"
    assert main(["export", str(run.path), "--csv", str(file)]) == 0
    assert losses(file) == [(step, loss(step)) for step in range(1, 41)]


def test_export_makes_both_files_and_replaces_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path).start(1).steps(1, 40).end()
    file, folder = tmp_path / "table.csv", tmp_path / "board"
    for _ in range(2):
        assert main(["export", str(run.path), "--csv", str(file), "--tensorboard", str(folder)]) == 0
        assert len(losses(file)) == len(curves(folder)["train/loss"]) == 40
        time.sleep(0.01)
    assert len(list(folder.glob("events.*"))) == 1
    assert f"everything in {run.path} is in {file}" in capsys.readouterr().out
    assert main(["export", str(run.path)]) == 1
    assert "--csv FILE" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--csv", str(file)]) == 1


def test_without_tensorboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from framework.callbacks import TensorBoardCallback

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"pip install 'goodput-framework\[tensorboard\]'"):
        TensorBoardCallback()


SWITCHED_ON = (
    "+callbacks.csv._target_=framework.callbacks.CSVCallback",
    "+callbacks.tensorboard._target_=framework.callbacks.TensorBoardCallback",
)


def test_a_run_that_is_killed_and_started_again_has_each_step_once_in_both(tmp_path: Path) -> None:
    from support import kill_at
    from support import start as begin

    words = ("+recipe=job", "run.name=r", "trainer.max_steps=30", *SWITCHED_ON)
    begin(*words, kill_at(17, "backward"), cwd=tmp_path).ends(-signal.SIGKILL)
    begin(*words, kill_at(17, "backward"), cwd=tmp_path).ends(0)
    begin(*words, "trainer.max_steps=36", cwd=tmp_path).ends(0)
    run = tmp_path / "runs/r"
    table, found = rows(run / "metrics.csv"), curves(run / "tensorboard")
    assert [step for step in table if "train/loss" in table[step]] == list(range(1, 37))
    assert [step for step, _ in found["train/loss"]] == list(range(1, 37))
    assert [step for step in table if "eval/loss" in table[step]] == [step for step, _ in found["eval/loss"]]
