"""Damaged files, full disks and closed outputs: what only tells must not end a training, and the fence still works."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from framework import rundir
from framework.callback import Callback
from framework.callbacks import GoodputMeterCallback
from framework.checkpoint import CheckpointStore
from framework.checkpoint.manifest import make_tag
from framework.errors import ConfigError, FrameworkError
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.reporting.report import build, summary_line
from framework.goodput.tracking.tail import JournalTail
from framework.journal import Journal, read_file
from framework.rundir import Lease, Owner, RunDirectory, write_whole
from framework.trainer import Trainer
from tests.loop.globals import process_state
from tests.loop.runs import Fit, core, events, fit, make, saved_steps

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    with process_state():
        yield


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes of a file comes up short, then fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_after_a_short_write_the_next_event_has_a_line_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "rank0.jsonl", 1)
    journal.event("thing", number=0)
    with largest_file(journal.path.stat().st_size + 20):
        journal.event("thing", number=1)
        journal.event("thing", durable=True, number=2)
    assert journal.path.read_bytes()[-1:] != b"\n"
    journal.event("thing", number=3)
    journal.event("thing", number=4)
    journal.close()
    assert [event["number"] for event in read_file(journal.path)] == [0, 3, 4]
    assert b"\n\n" not in journal.path.read_bytes()
    assert caplog.text.count("an event could not be written") == 1


def test_what_a_short_write_left_over_is_written_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, real = Journal(tmp_path / "rank0.jsonl", 1), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
        journal.event("thing", number=0)
    journal.close()
    assert [event["number"] for event in read_file(journal.path)] == [0]


def test_who_follows_a_journal_leaves_the_same_lines_out(tmp_path: Path) -> None:
    file = tmp_path / "att-0001" / "rank0.jsonl"
    journal, tail = Journal(file, 1), JournalTail(tmp_path)
    (tmp_path / "att-²").mkdir()
    (tmp_path / "att-²" / "rank0.jsonl").touch()
    journal.event("thing", number=0)
    with file.open("ab") as stream:
        stream.write(b'{"torn\n{}\n17\n')
    journal.event("thing", number=1)
    assert [event["number"] for event in tail.read()] == [0, 1]
    journal.event("thing", number=2)
    journal.close()
    assert [event["number"] for event in tail.read()] == [2]


def test_a_name_that_is_no_utf_8_can_be_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rank0.jsonl", 1)
    journal.event("thing", command=[os.fsdecode(b"caf\xe9")])
    journal.close()
    assert [event["command"] for event in read_file(journal.path)] == [["caf\udce9"]]


def test_a_journal_that_is_a_directory_holds_no_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank0.jsonl").mkdir()
    assert list(read_file(tmp_path / "rank0.jsonl")) == []
    assert "cannot be read" in caplog.text


def test_a_training_goes_on_while_the_journal_cannot_be_written(tmp_path: Path) -> None:
    class Break(Callback):
        def train_start(self, trainer: Trainer, resumed: bool) -> None:
            assert trainer.journal is not None
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, trainer.journal._fd)
            os.close(full)

    fit(tmp_path, callbacks=core(a=Break()))
    assert saved_steps(tmp_path)[-1] == 12


@pytest.mark.parametrize(
    "damage",
    [
        {"m": None}, {"t": "x"}, {"t": float("nan")}, {"m": float("inf")}, {"att": "1"}, {"att": None}, {"seconds": 3},
        {"seconds": {"productive": 7}}, {"first": None}, {"loss": 4}, {"start": "x"}, {"started": []},
    ],
)  # fmt: skip
def test_the_books_skip_what_they_cannot_read(damage: dict[str, Any]) -> None:
    def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
        return {"att": 1, "ev": name, "t": 1000.0 + at, "m": at, **fields}

    steps = {"seconds": {"productive": [1.0]}, "loss": [1.0]}
    whole = [
        event("attempt_start", 1, started=1000.0),
        event("steps", 3, first=1, start=1001.0, **steps),
        event("steps", 5, first=2, start=1003.0, **steps),
        event("end", 6, status="finished"),
    ]
    for index in range(len(whole)):
        ledger = Ledger()
        for number, one in enumerate(whole):
            ledger.add(one | damage if number == index else one)
        total = ledger.total()
        assert total.steps_done >= 1 and (total.status == "finished") == (
            index != 3 or not {"m", "t", "att"} & {*damage}
        )
        list(ledger.intervals())


def test_an_unreadable_journal_of_an_older_attempt_leaves_the_summary(tmp_path: Path) -> None:
    older = tmp_path / "events" / "att-0001" / "rank0.jsonl"
    older.parent.mkdir(parents=True)
    older.write_bytes(b'{"ev": "steps", "att": 1, "t": 1}\n\x00\xff\n[]\n')
    fit(tmp_path, callbacks=core(goodput_meter=GoodputMeterCallback()))
    assert "12 steps" in summary_line(tmp_path)
    (older.parent.with_name("att-²")).mkdir()
    (older.parent.with_name("att-²") / "rank0.jsonl").touch()
    assert build(tmp_path).goodput.steps_done == 12


@pytest.mark.parametrize("content", [b"\0\0\0", b"\xff\xfe\x00", b"- 1\n- 2\n", b"a: [\n", b"just words", None])
def test_a_damaged_config_is_said_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    saved = tmp_path / "config.yaml"
    saved.mkdir() if content is None else saved.write_bytes(content)
    fit(tmp_path, config={"a": 1}, max_steps=2)
    fit(tmp_path, config={"a": 1}, max_steps=2)  # finished: it is looked at once more
    assert caplog.text.count("what changed since the run began is not known") == 2
    assert saved.is_dir() if content is None else saved.read_bytes() == content


def test_an_empty_config_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    fit(tmp_path, config={"a": 1}, max_steps=2)
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_disk_without_room_for_the_config_is_named_and_the_directory_given_back(tmp_path: Path) -> None:
    trainer = make(tmp_path, config={"a": "x" * 100_000})
    with largest_file(50_000), pytest.raises(ConfigError, match="cannot be written"):
        trainer.fit()
    owner = trainer.run.owner()
    assert owner is not None and not owner.is_live
    assert not (tmp_path / "config.yaml").exists() and not list(tmp_path.glob(".*.tmp"))


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "before")
    with largest_file(10), pytest.raises(OSError):
        write_whole(tmp_path / "a", "x" * 100)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\0", '{"token": "theirs"}'])
def test_a_file_that_names_nobody_takes_no_lease_away_and_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(rundir, "RENEW_SECONDS", 0.01)
    run = RunDirectory(tmp_path)
    lease = run.acquire()
    if content is None:
        run.owner_file.unlink()
    else:
        run.owner_file.write_text(content)
    assert lease.is_held()
    wait_for(lambda: (owner := run.owner()) is not None and owner.token == lease.token)
    lease.release()


def test_another_token_still_takes_the_lease_away_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "RENEW_SECONDS", 0.01)
    run = RunDirectory(tmp_path)
    lease = run.acquire()
    run.owner_file.write_text(json.dumps(json.loads(run.owner_file.read_text()) | {"token": "theirs"}))
    assert not lease.is_held()
    wait_for(lambda: not lease._thread.is_alive())
    lease.release()
    owner = run.owner()
    assert owner is not None and owner.token == "theirs"


def test_a_directory_that_is_gone_is_not_made_again_by_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "RENEW_SECONDS", 0.01)
    run, tried = RunDirectory(tmp_path / "run"), threading.Semaphore(0)
    lease = run.acquire()
    real = Lease._restore
    monkeypatch.setattr(Lease, "_restore", lambda self: (real(self), tried.release()))
    shutil.rmtree(run.path)
    for _ in range(3):
        assert tried.acquire(timeout=20)
    assert lease.is_held() and not run.path.exists()
    run.path.mkdir()
    wait_for(lambda: run.owner() is not None)
    lease.release()


@pytest.mark.parametrize(
    "odd",
    [{"pid": "7"}, {"pid": -1}, {"pid": True}, {"attempt": "3"}, {"attempt": None}, {"attempt": 1.5}, {"renewed": "x"},
     {"started": None}, {"renewed": float("nan")}, {"host": 3}],
)  # fmt: skip
def test_odd_owners_own_nothing(tmp_path: Path, odd: dict[str, Any]) -> None:
    run = RunDirectory(tmp_path)
    whole = {"host": socket.gethostname(), "pid": 1, "started": 1.0, "attempt": 4, "token": "t", "renewed": 5.0}
    run.owner_file.write_text(json.dumps(whole))
    assert isinstance(run.owner(), Owner)
    run.owner_file.write_text(json.dumps(whole | odd))
    assert run.owner() is None
    lease = run.acquire()
    assert lease.attempt == 1
    lease.release()


def test_folders_that_are_numbered_oddly_are_no_attempts(tmp_path: Path) -> None:
    for name in ("att-²", "att-x", "att-0003"):
        (tmp_path / "events" / name).mkdir(parents=True)
    lease = RunDirectory(tmp_path).acquire()
    assert lease.attempt == 4
    lease.release()


def test_what_cannot_be_owned_is_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "owner.json").mkdir(parents=True)
    (tmp_path / "b").symlink_to("b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "events").touch()
    for name, part in (("a", "a/owner.json"), ("b", "b"), ("c", "c/events")):
        with pytest.raises(FrameworkError) as caught:
            make(tmp_path / name).fit()
        assert str(tmp_path / part) in str(caught.value)
    assert RunDirectory(tmp_path / "a").owner() is None


def test_a_run_stays_where_it_is_when_the_working_directory_changes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Moves(Callback):
        def setup(self, trainer: Trainer) -> None:
            os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        fit(Path("runs/a"), callbacks=core(goodput_meter=GoodputMeterCallback(), moves=Moves()))
    assert saved_steps(tmp_path / "runs" / "a")[-1] == 12
    assert events(tmp_path / "runs" / "a", "end")[-1]["status"] == "finished"
    assert not any((tmp_path / "elsewhere").iterdir())
    assert "attempt 1, in runs/a" in caplog.text
    assert capsys.readouterr().out.endswith(" · runs/a\n")


class FailsToClose(Callback):
    def __init__(self, critical: bool) -> None:
        self.critical = critical

    def close(self, trainer: Trainer) -> None:
        raise RuntimeError("cannot close")


def test_an_observer_that_cannot_close_leaves_the_run_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, callbacks=core(a=FailsToClose(critical=False)))
    assert "callback 'a' failed in close(): RuntimeError: cannot close" in caplog.text
    assert [event["status"] for event in events(tmp_path, "end")] == ["finished"]


def test_the_last_end_in_the_journal_is_that_of_the_process(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot close"):
        make(tmp_path, callbacks=core(a=FailsToClose(critical=True))).fit()
    last = events(tmp_path, "end")[-1]
    assert (last["status"], last["exit_code"], last["reason"]) == ("failed", 1, "RuntimeError: cannot close")
    ledger = Ledger()
    for event in events(tmp_path):
        ledger.add(event)
    assert ledger.total().status == "failed"


def test_a_disk_that_is_full_at_the_end_skips_nothing_that_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    class Closes(Callback):
        def close(self, trainer: Trainer) -> None:
            closed.append(self.name)

    trainer = make(tmp_path, callbacks=core(a=Closes(), b=Closes()))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fills(Callback):
        def train_end(self, trainer: Trainer, status: str) -> None:
            close = trainer.built.loader.close
            monkeypatch.setattr(trainer.built.loader, "close", lambda: (closed.append("loader"), close()))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))

    trainer.callbacks["fills"] = Fills()
    try:
        code = trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 0 and closed == ["b", "a", "loader"] and saved_steps(tmp_path)[-1] == 12
    assert "giving the run directory back failed" in caplog.text and "an event could not be written" in caplog.text


def test_a_run_whose_output_nobody_takes_ends_well(tmp_path: Path) -> None:
    code = (
        "import sys; from framework.callbacks import GoodputMeterCallback as G; from tests.loop.runs import core, make;"
        "from pathlib import Path;"
        "sys.exit(max(make(Path(p), callbacks=core(g=G()), max_steps=2).fit() for p in sys.argv[1:]))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for name, output in (("pipe", writer), ("full", full)):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name)],
            stdout=output, stderr=subprocess.PIPE, cwd=ROOT, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        os.close(output)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_trial_files_of_older_attempts_are_swept(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        (tmp_path / f".probe.{make_tag(attempt, 'token', 0)}.{attempt}").touch()
    (tmp_path / ".probe.mine").touch()
    removed = CheckpointStore(tmp_path).sweep(2)
    assert [path.name[:14] for path in removed] == [".probe.000001-"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_trial_file_is_gone_after_the_next_attempt(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / f".probe.{make_tag(1, 'token', 0)}.0"
    left.parent.mkdir()
    left.touch()
    (tmp_path / "events" / "att-0001").mkdir(parents=True)
    fit(tmp_path, Fit(), max_steps=2)
    assert not left.exists()
