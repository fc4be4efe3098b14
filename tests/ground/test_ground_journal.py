"""The event log: one writer, whole lines, nothing after a torn one."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from framework.journal import Journal, read_file, read_run


def write(path: Path, attempt: int = 1, count: int = 3) -> None:
    journal = Journal(path, attempt)
    for number in range(count):
        journal.event("thing", number=number)
    journal.close()


def test_events_are_numbered_and_dated(tmp_path: Path) -> None:
    file = tmp_path / "events" / "att-0001" / "rank0.jsonl"
    write(file)
    events = list(read_file(file))
    assert [event["seq"] for event in events] == [0, 1, 2]
    assert [event["number"] for event in events] == [0, 1, 2]
    assert {(event["v"], event["att"], event["ev"]) for event in events} == {(1, 1, "thing")}
    assert all(isinstance(event[clock], float) for event in events for clock in ("t", "m"))


@pytest.mark.parametrize("cut", range(12))
def test_a_torn_last_line_is_dropped_wherever_it_was_torn(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "rank0.jsonl"
    write(file)
    whole = file.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    file.write_bytes(whole[: len(whole) - 1 - (cut * last // 12)])
    assert [event["number"] for event in read_file(file)] == [0, 1]


def test_a_line_that_is_no_event_is_left_out_alone(tmp_path: Path) -> None:
    file = tmp_path / "rank0.jsonl"
    write(file)
    lines = file.read_bytes().splitlines(keepends=True)
    for damage in (
        b"{torn\n",
        b"17\n",
        b"\n",
        b"{}\n",
        b'{"ev": 1, "att": "x", "t": null}\n',
        b"\xff\0\n",
        b"[" * 99_999 + b"\n",
    ):
        file.write_bytes(lines[0] + damage + lines[2])
        assert [event["number"] for event in read_file(file)] == [0, 2]


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    write(tmp_path / "rank0.jsonl")
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "rank0.jsonl", 1)


def test_a_line_is_one_write_with_the_newline_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = os.write

    def spy(fd: int, data: bytes) -> int:
        written.append(bytes(data))
        return real(fd, data)

    journal = Journal(tmp_path / "rank0.jsonl", 1)
    monkeypatch.setattr(os, "write", spy)
    journal.event("thing", text="two\nlines", big="x" * 100_000)
    monkeypatch.undo()
    journal.close()
    assert len(written) == 1 and written[0].count(b"\n") == 1 and written[0].endswith(b"\n")


def test_values_that_are_no_numbers_of_json_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rank0.jsonl", 1)
    journal.event("steps", loss=[math.nan, math.inf, -math.inf, 0.1], path=tmp_path, name="é")
    journal.close()
    (event,) = read_file(tmp_path / "rank0.jsonl")
    assert math.isnan(event["loss"][0]) and event["loss"][1:] == [math.inf, -math.inf, 0.1]
    assert (event["path"], event["name"]) == (str(tmp_path), "é")


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rank0.jsonl", 1)
    journal.close()
    journal.close()


def test_a_run_is_read_in_the_order_of_its_attempts_and_by_rank(tmp_path: Path) -> None:
    for attempt in (10, 2, 1):
        for rank in (0, 1):
            write(tmp_path / f"att-{attempt:04d}" / f"rank{rank}.jsonl", attempt, count=rank + 1)
    assert [event["att"] for event in read_run(tmp_path)] == [1, 2, 10]
    assert [event["att"] for event in read_run(tmp_path, rank=1)] == [1, 1, 2, 2, 10, 10]
    assert read_run(tmp_path / "nowhere") == []


def write_until_killed(path: Path) -> None:
    journal = Journal(path, 1)
    for number in range(200):
        journal.event("thing", number=number, ballast="x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="fork and SIGKILL")
def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path / "j.jsonl",))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert [event["number"] for event in read_file(tmp_path / "j.jsonl")] == list(range(200))
    for line in (tmp_path / "j.jsonl").read_text().splitlines():
        json.loads(line)
