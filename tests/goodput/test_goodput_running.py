"""The account that the training keeps of itself."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from goodput_story import Story

from framework.goodput.accounts.account import account
from framework.goodput.accounts.running import RunningAccount


def lines(events: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def file_of(folder: Path, attempt: int) -> Path:
    file = folder / f"att-{attempt:04d}" / "rank0.jsonl"
    file.parent.mkdir(parents=True)
    return file


@contextmanager
def kept(folder: Path, attempt: int) -> Iterator[RunningAccount]:
    running = RunningAccount(folder, attempt)
    try:
        yield running
    finally:
        running.close()
    assert not any(thread.name == "goodput" for thread in threading.enumerate())


def killed_and_ended() -> Story:
    """20 steps of which 5 are lost, a pause, and the rest."""
    story = Story().start(init=2.0).train(15, productive=1.0, data_wait=0.1).commit(stall=0.5, persist=1.0)
    story.train(5, productive=1.0).wait(30).start(init=2.0, restored=15, restore_seconds=1.0)
    return story.train(25, productive=1.0, data_wait=0.2).wait(1).end()


def test_it_says_of_all_attempts_what_the_report_says(tmp_path: Path) -> None:
    told = killed_and_ended().events
    second = [event for event in told if event["att"] == 2]
    file_of(tmp_path, 1).write_text(lines([event for event in told if event["att"] == 1]) + '{"v": 1, "se')
    file_of(tmp_path, 2).write_text(lines(second[:2]))
    with kept(tmp_path, 2) as running:
        for event in second[2:]:
            running.add(event)
        total = running.total(30)
    assert total == account(told)
    assert total is not None and (total.steps_done, total.steps_lost, total.attempts) == (40, 5, 2)


def test_there_are_no_figures_before_earlier_attempts_are_read(tmp_path: Path) -> None:
    told = killed_and_ended().events
    earlier = file_of(tmp_path, 1)
    os.mkfifo(earlier)  # to read it takes until somebody has written it
    with kept(tmp_path, 2) as running:
        for event in told:
            if event["att"] == 2:
                running.add(event)
        assert running.total() is None and running.total(0.1) is None
        earlier.write_text(lines([event for event in told if event["att"] == 1]))
        assert running.total(30) == account(told)


def test_an_end_does_not_wait_for_a_long_past(tmp_path: Path) -> None:
    story = Story().start()
    for _ in range(5000):
        story.train(100, productive=0.01)
    file_of(tmp_path, 1).write_text(lines(story.events))
    later = Story().start().train(1, productive=1.0)
    with kept(tmp_path, 2) as running:
        for event in later.events:
            running.add(event)
