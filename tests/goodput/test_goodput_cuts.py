"""The journal of a real run, broken off at any byte, and with lines gone: it is read, and what it lacks is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from support import kill_at, start

from framework.goodput.__main__ import main
from framework.goodput.accounts.account import account
from framework.goodput.reporting.report import build
from framework.goodput.tracking.points import PointMaker
from framework.journal import Damage, read_file, read_run

WORDS = ("+recipe=job", "run.name=r", "trainer.max_steps=20")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts: the first was killed, the second went on and finished."""
    folder = tmp_path_factory.mktemp("real")
    start(*WORDS, kill_at(13, "backward"), cwd=folder).ends(-signal.SIGKILL)
    start(*WORDS, kill_at(13, "backward"), cwd=folder).ends(0)
    return folder / "runs/r"


@pytest.fixture
def run(real: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(real / "events", tmp_path / "r/events")).parent


def journal(run: Path, attempt: int) -> Path:
    return run / f"events/att-{attempt:04d}/rank0.jsonl"


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_real_journal_broken_off_at_any_byte_is_read_up_to_its_last_whole_line(attempt: int, run: Path) -> None:
    file = journal(run, attempt)
    whole, data = list(read_file(file)), file.read_bytes()
    other = list(read_file(journal(run, 3 - attempt)))
    accounted: set[int] = set()
    assert len(whole) > 5
    for length in range(len(data), -1, -1):
        os.truncate(file, length)
        damage = Damage(attempt)
        events = list(read_file(file, damage))
        count = data.count(b"\n", 0, length)
        assert events == whole[:count]
        torn = length - (data.rfind(b"\n", 0, length) + 1)
        assert damage == Damage(attempt, torn_bytes=torn)
        if count in accounted:
            continue  # the account is made of the events alone
        accounted.add(count)
        result = account(events + other if attempt == 1 else other + events)
        total = sum(round(seconds * 1e9) for seconds in result.seconds.values())
        assert total == round(result.wall * 1e9)
        assert (
            min(result.seconds.values()) >= 0 and result.overlap_seconds < 1e-3
        )  # what lies between two clock readings
    assert len(accounted) == len(whole) + 1


def test_torn_tails_and_gaps_are_told_by_attempt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert "not whole" not in capsys.readouterr().out
    assert build(run).journal == []
    first, second = journal(run, 1), journal(run, 2)
    first.write_bytes(first.read_bytes() + b'{"v":1,"se')
    lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join([*lines[:2], *lines[4:6], b"\0\0\0\n", *lines[7:]]))
    assert main(["report", str(run)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "not whole" in line] == [
        "The journal is not whole, and what it lacks is in none of these figures: attempt 1: 10 bytes of a last line that "
        "was never finished; attempt 2: 3 events missing, 1 line that cannot be read."
    ]
    assert "attempt 2: 3 events missing" in (run / "report.html").read_text()
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["journal"] == [
        {"attempt": 1, "missing": 0, "unreadable": 0, "torn_bytes": 10},
        {"attempt": 2, "missing": 3, "unreadable": 1, "torn_bytes": 0},
    ]


def test_attempts_are_in_the_order_of_their_numbers_beyond_four_digits(run: Path) -> None:
    for attempt, name in ((1, "att-9999"), (2, "att-10000")):
        journal(run, attempt).parent.rename(run / "events" / name)
    assert [event["att"] for event in read_run(run / "events")] == sorted(e["att"] for e in read_run(run / "events"))


@pytest.mark.parametrize("field", ["m", "seq", "step", "first", "seconds", "values", "captured"])
@pytest.mark.parametrize("value", [None, "x", [], {}, -1, True])
def test_events_with_a_wrong_value_stop_no_reader(field: str, value: object, run: Path) -> None:
    file = journal(run, 2)
    events = [json.loads(line) for line in file.read_bytes().splitlines()]
    changed = [event | {field: value} if field in event else event for event in events]
    file.write_text("".join(json.dumps(event) + "\n" for event in changed))
    report, maker = build(run), PointMaker()
    for event in read_run(run / "events"):
        maker.feed(event)
    assert sum(report.goodput.seconds.values()) == pytest.approx(report.goodput.wall)
