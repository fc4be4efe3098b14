"""The copy in MLflow: a real exporter process, a real journal, a real sqlite store, processes that really die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from goodput_runs import Run, Store, clean_environment, finish, free_port, kill, loss, parent, started, wait_until

from framework.goodput.tracking.exporter_process import ExporterProcess
from framework.goodput.tracking.mlflow_run import ExportState

pytestmark = pytest.mark.usefixtures("tables")


def exported(run: Run, *options: str) -> str:
    """Exports what is there, as a user does; returns what it printed."""
    command = [sys.executable, "-m", "framework.goodput", "export", str(run.path), "--mlflow", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, env=clean_environment(), cwd=run.path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_finished_run_is_copied_whole(tmp_path: Path) -> None:
    root = tmp_path / "my runs"
    run = Run(root, is_fresh=True)
    trainer = parent()
    try:
        run.start(trainer.pid).steps(1, 40).commit(40)
        run.journal.event("metrics", step=40, values={"eval/top1": 0.75})
        run.end()
        assert finish(run.exporter(trainer.pid)) == (0, "", ""), "done at the end event, and quiet"
    finally:
        kill(trainer)
    store = Store(run.database)
    assert store.runs() == [(ExportState.read(run.directory.mlflow_file).run_id, "toy run", "FINISHED")]  # type: ignore[union-attr]
    assert store.series("train/loss") == [(step, loss(step)) for step in range(1, 41)]
    assert store.series("train/lr") == [(step, 0.1 / step) for step in range(1, 41)]
    assert store.series("train/top1") == [(step, step / 1000) for step in range(1, 41, 2)]
    assert store.series("data/fetch_seconds") == [(step, 0.0002) for step in range(1, 41)]
    assert store.series("eval/top1") == [(40, 0.75)]
    assert store.series("checkpoint/stall_seconds") == [(40, 0.25)]
    assert store.series("checkpoint/persist_seconds") == [(40, 1.5)]
    assert store.series("checkpoint/step") == [(40, 40.0)]
    for key in ("goodput/ratio", "goodput/ratio_durable", "goodput/productive_seconds", "checkpoint/age_seconds"):
        assert store.series(key)[-1][0] == 40
    assert store.doubles() == []
    assert store.params() == {"model._target_": "torch.nn.Linear", "seed": "7", "trainer.max_steps": "40"}
    assert {key: store.tags()[key] for key in ("attempts", "attempt.1.status", "attempt.1.world_size")} == {
        "attempts": "1", "attempt.1.status": "finished", "attempt.1.world_size": "2",
    }  # fmt: skip
    [artifact] = (root / "mlartifacts").rglob("config.yaml")
    assert artifact.read_bytes() == run.directory.config_file.read_bytes()
    assert sorted(path.name for path in run.path.iterdir() if not path.name.startswith(".")) == [
        "config.yaml", "events", "mlflow.json",
    ], "nothing is left where it was started"  # fmt: skip


@pytest.mark.parametrize(
    ("status", "exit_code", "expected"),
    [("failed", 1, "FAILED"), ("stopped", 143, "KILLED"), ("stopped", 0, "FINISHED")],
)
def test_the_status_says_how_the_run_ended(tmp_path: Path, status: str, exit_code: int, expected: str) -> None:
    run = Run(tmp_path).start(1).steps(1, 3).end(status, exit_code, 3)
    exported(run)
    assert Store(run.database).status() == expected


def test_a_killed_run_is_killed_and_its_next_attempt_continues_it(tmp_path: Path) -> None:
    run, store = Run(tmp_path), Store(tmp_path / "mlflow.db")
    trainer = parent()
    run.start(trainer.pid).steps(1, 20).commit(20).steps(21, 30)
    first = run.exporter(trainer.pid)
    wait_until(lambda: len(store.series("train/loss")) == 30)
    assert store.status() == "RUNNING"
    kill(trainer)
    run.journal.close()
    assert finish(first) == (0, "", "")
    assert store.status() == "KILLED"

    trainer = parent()
    changed = {"seed": 8, "model": ["a"], "extra": None}
    run.start(trainer.pid, step=20, config_changed=changed).steps(21, 35)  # 21 to 30 once more
    second = run.exporter(trainer.pid)
    wait_until(lambda: len(store.series("train/loss")) == 35)
    assert store.status() == "RUNNING"
    run.steps(36, 40).end()
    assert finish(second) == (0, "", "")
    kill(trainer)
    assert store.status() == "FINISHED"
    assert store.series("train/loss") == [(step, loss(step)) for step in range(1, 41)]
    assert store.doubles() == []
    assert dict(store.series("goodput/lost_seconds"))[40] > 0
    assert store.params() == {"model._target_": "torch.nn.Linear", "seed": "7", "trainer.max_steps": "40"}
    tags = store.tags()
    assert (tags["attempt.2.config.model"], tags["attempt.2.config.extra"]) == ('["a"]', "null")
    assert (tags["attempt.2.config.seed"], tags["attempt.2.step"], tags["attempts"]) == ("8", "20", "2")


def test_a_finished_run_that_is_extended_is_taken_up_again(tmp_path: Path) -> None:
    """By a process of the same id, as in a container, or by the same process."""
    run, store = Run(tmp_path), Store(tmp_path / "mlflow.db")
    trainer = parent()
    run.start(trainer.pid).steps(1, 40).end()
    assert finish(run.exporter(trainer.pid, "--attempt", "1")) == (0, "", "")
    assert store.status() == "FINISHED"
    second = run.exporter(trainer.pid, "--attempt", "2")  # the second attempt has written nothing yet
    wait_until(lambda: store.status() == "RUNNING")
    time.sleep(1.0)
    assert second.poll() is None and store.status() == "RUNNING"
    run.start(trainer.pid, step=40).steps(41, 50)
    wait_until(lambda: len(store.series("train/loss")) == 50)
    run.end("failed", 1, step=50)
    assert finish(second) == (0, "", "")
    kill(trainer)
    assert store.status() == "FAILED"
    assert store.series("train/loss") == [(step, loss(step)) for step in range(1, 51)]
    assert store.doubles() == []


def test_the_report_of_all_attempts_is_an_artifact(tmp_path: Path) -> None:
    run = Run(tmp_path).start(1).steps(1, 40).end()
    exported(run)
    run.start(1, step=40).steps(41, 50).end(step=50)
    exported(run)
    names = ("report.json", "report.html", "report.txt")
    [values], [pictures], [text] = ((tmp_path / "mlartifacts").rglob(name) for name in names)
    report = json.loads(values.read_text())
    assert [line["attempt"] for line in report["history"]] == [1, 2]
    assert abs(sum(report["seconds"].values()) - report["wall"]) < 0.001
    assert "50 steps done" in text.read_text()
    assert "<svg" in pictures.read_text() or "<script" in pictures.read_text()
    before = values.stat().st_mtime_ns
    exported(run)
    assert values.stat().st_mtime_ns == before, "nothing happened since, nothing is sent"


@pytest.mark.parametrize("moment", ["connecting", "copying", "unnoted"])
def test_killing_the_exporter_loses_and_doubles_nothing(tmp_path: Path, moment: str) -> None:
    run, store = Run(tmp_path), Store(tmp_path / "mlflow.db")
    trainer = parent()
    run.start(trainer.pid).steps(1, 2000)
    exporter = run.exporter(trainer.pid)
    if moment == "connecting":  # somewhere between making the run and noting its id
        wait_until(lambda: store.status() is not None)
        kill(exporter)
        state = ExportState.read(run.directory.mlflow_file)
        assert state is not None
        if state.run_id:
            ExportState(state.tracking_uri, state.experiment, state.run_name, state.key).write(
                run.directory.mlflow_file
            )
    else:
        wait_until(lambda: len(store.series("train/loss")) > 500)
        kill(exporter)
    if moment == "unnoted":  # the server took points, and the note of it was lost
        state = json.loads(run.directory.mlflow_file.read_text())
        run.directory.mlflow_file.write_text(json.dumps(state | {"attempt": 1, "seq": 30}))
    exporter.communicate()
    run.steps(2001, 2010).end(step=2010)
    assert finish(run.exporter(trainer.pid)) == (0, "", "")
    kill(trainer)
    assert store.status() == "FINISHED"
    assert store.series("train/loss") == [(step, loss(step)) for step in range(1, 2011)]
    assert store.doubles() == []


def test_a_server_that_is_away_costs_one_line_and_the_copy_is_made_later(tmp_path: Path) -> None:
    run = Run(tmp_path, uri=f"http://127.0.0.1:{free_port()}")
    trainer = parent()
    run.start(trainer.pid).steps(1, 20)
    begun = time.monotonic()
    exporter = run.exporter(trainer.pid, "--linger", "1")
    assert exporter.stderr is not None
    line = exporter.stderr.readline()
    assert time.monotonic() - begun < 30  # 10 s on a machine of its own; here the other tests run too
    assert line.startswith(f"warning: MLflow at {run.uri} is not available")
    run.end()
    kill(trainer)
    code, _, rest = finish(exporter)
    assert code == 1
    assert rest.count("\n") == 1
    assert "python -m framework.goodput export RUN --mlflow" in rest
    exported(run, "--uri", f"sqlite:///{run.database}")
    assert Store(run.database).status() == "FINISHED"
    assert len(Store(run.database).series("train/loss")) == 20


def test_a_server_that_accepts_and_never_answers_does_not_hold_the_exporter(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        run = Run(tmp_path, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        trainer = parent()
        run.start(trainer.pid).steps(1, 20).end()
        exporter = run.exporter(trainer.pid, "--linger", "1")
        assert exporter.stderr is not None
        assert "is not available" in exporter.stderr.readline()
        kill(trainer)
        assert finish(exporter, 30)[0] == 1


def test_three_exporters_share_one_fresh_store(tmp_path: Path) -> None:
    runs = [Run(tmp_path, name=f"run{number}", is_fresh=True).start(1).steps(1, 10).end() for number in range(3)]
    gone = parent()
    kill(gone)
    exporters = [run.exporter(gone.pid) for run in runs]
    assert [finish(exporter) for exporter in exporters] == [(0, "", "")] * 3
    store = Store(tmp_path / "mlflow.db")
    assert [status for _, _, status in store.runs()] == ["FINISHED"] * 3
    assert len(store.rows("select * from experiments where name = 'tests'")) == 1
    assert len(store.series("train/loss")) == 30


def test_nasty_configurations_become_parameters_and_an_equal_artifact(tmp_path: Path) -> None:
    deep = (
        "".join(f"{'  ' * level}a_level_with_a_long_name_{level:02d}:\n" for level in range(12))
        + "  " * 12
        + "leaf: 1\n"
    )
    config = (
        f"long: [{', '.join(['12345678'] * 1000)}]\n" + deep + "\n".join(f"key{n}: {n}" for n in range(310))
        + "\n'callbacks[0]': x\n'+recipe': toy\nname: Jürgen ☃\nnothing: null\nempty: ''\n'a@b/../c': 1\n"
    )  # fmt: skip
    run = Run(tmp_path, config=config).start(1).steps(1, 5).end()
    exported(run)
    store = Store(run.database)
    assert store.status() == "FINISHED"
    params = store.params()
    assert len(params) == 318
    assert len(params["long"]) == 6000
    assert "the whole value is in config.yaml" in params["long"]
    assert (params["_recipe"], params["callbacks_0_"], params["name"], params["nothing"]) == (
        "toy",
        "x",
        "Jürgen ☃",
        "null",
    )
    [leaf] = [key for key in params if key.endswith("leaf")]
    assert len(leaf) <= 250
    note = store.tags()["config.note"]
    assert "callbacks[0] -> callbacks_0_" in note
    assert "artifact config.yaml" in note
    [artifact] = (tmp_path / "mlartifacts").rglob("config.yaml")
    assert artifact.read_text() == config
    assert len(store.series("train/loss")) == 5


def test_a_file_store_is_refused_in_one_line_that_names_the_alternative(tmp_path: Path) -> None:
    run = Run(tmp_path, uri="file:./mlruns").start(1).end()
    code, out, err = finish(run.exporter(os.getpid()))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"sqlite:///{run.path}/mlruns/mlflow.db" in err


def test_exporting_again_sends_nothing_twice_and_a_fresh_store_gets_everything(tmp_path: Path) -> None:
    run = Run(tmp_path).start(1).steps(1, 10).end()
    assert "everything in" in exported(run)
    exported(run)
    store = Store(run.database)
    assert (len(store.runs()), len(store.series("train/loss")), store.doubles()) == (1, 10, [])
    run.database.unlink()
    exported(run)
    assert (len(store.runs()), len(store.series("train/loss"))) == (1, 10)


def test_export_of_what_is_no_run_is_exit_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "framework.goodput", "export", str(tmp_path), "--mlflow"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment(), check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


TRAINER = """
import os, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from goodput_runs import Run
from framework.goodput.tracking.exporter_process import ExporterProcess
run = Run(Path({root!r}))
exporter = ExporterProcess(run.path, run.uri, "tests", "toy run", linger_seconds=5)
exporter.start()
assert not {{"torch", "mlflow"}} & set(sys.modules)
run.start(os.getpid()).steps(1, 40)
print(exporter.pid, flush=True)
if {how!r} == "end":
    run.end()
    sys.exit(0 if exporter.finish(60) else 3)
time.sleep(120)
"""


@pytest.mark.parametrize("how", ["end", "ctrl-c", "kill"])
def test_the_trainer_starts_an_exporter_that_outlives_it_just_long_enough(tmp_path: Path, how: str) -> None:
    code = TRAINER.format(path=[*sys.path, str(Path(__file__).parent)], root=str(tmp_path), how=how)
    trainer = started(
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=clean_environment(), start_new_session=True,
        )
    )  # fmt: skip
    assert trainer.stdout is not None
    exporter = int(trainer.stdout.readline())
    store = Store(tmp_path / "mlflow.db")
    if how != "end":
        wait_until(lambda: len(store.series("train/loss")) == 40)
        os.killpg(trainer.pid, signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
    _, err = trainer.communicate(timeout=60)  # the exporter holds none of its streams open
    assert trainer.returncode == {"end": 0, "ctrl-c": -signal.SIGINT, "kill": -signal.SIGKILL}[how], err
    assert how == "ctrl-c" or err == ""
    wait_until(lambda: not Path(f"/proc/{exporter}").exists() or how == "end")
    assert store.status() == ("FINISHED" if how == "end" else "KILLED")
    assert len(store.series("train/loss")) == 40
    assert (tmp_path / "toy/exporter.log").exists()


def test_a_warning_reaches_the_trainer_and_finish_is_bounded(tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(tmp_path).start(os.getpid()).steps(1, 5)
    exporter = ExporterProcess(
        run.path, f"http://127.0.0.1:{free_port()}", "tests", "toy", linger_seconds=0.0, say=said.append
    )
    exporter.start()
    run.end()
    try:
        assert not exporter.finish(0.1)
        wait_until(lambda: said)
        assert said[0].startswith("warning: MLflow at http://127.0.0.1:")
    finally:
        assert exporter.pid is not None
        os.kill(exporter.pid, signal.SIGKILL)
        assert not exporter.finish(20)
