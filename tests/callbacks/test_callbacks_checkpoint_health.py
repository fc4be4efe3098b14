"""When a failed save is tried again, when saves are late, and when one does not fit the grace period."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.callbacks import AsyncCheckpointCallback
from framework.callbacks.save_health import Age, Grace, Retries, last_save_seconds, never_best
from framework.checkpoint.files import words_of
from framework.checkpoint.retention import Keep
from framework.duration import Duration
from framework.errors import ConfigError
from framework.journal import Journal


def test_a_failed_save_is_tried_again_at_once_then_after_a_while_and_then_it_counts() -> None:
    retries = Retries()
    for _ in range(2):  # counting begins anew
        assert retries.failed(6, "disk full", now=100.0) == 0.0
        assert retries.is_due(100.0) and not retries.is_due(100.0)
        assert retries.failed(7, "disk full", now=101.0) == 5.0
        assert [retries.is_due(now) for now in (105.9, 106.0, 107.0)] == [False, True, False]
        assert retries.failed(9, "disk full", now=106.0) is None and not retries.is_due(1e9)


def test_a_success_forgets_failures_and_what_is_superseded_is_not_tried_again() -> None:
    retries = Retries()
    retries.failed(6, "disk full", now=0.0)
    retries.succeeded()
    assert not retries.is_due(1.0) and retries.failed(8, "disk full", now=2.0) == 0.0
    assert Retries().failed(6, "superseded: another attempt owns the run now", now=0.0) is None


def test_age_in_steps_counts_from_the_start_and_from_the_saved_state() -> None:
    age = Age(Duration.parse(10, key="every"))
    age.begin(100, now=0.0)
    assert age.late(115, 1.0) is None
    assert "16 steps old, but one is due every 10 steps" in (age.late(116, 1.0) or "")
    assert age.late(117, 1.0) is None
    age.committed(110, 0.0, now=1.0)  # in time again
    assert age.late(125, 1.0) is None and age.late(126, 1.0) is not None


def test_saves_that_are_late_one_after_the_other_are_told_of_once() -> None:
    age = Age(Duration.parse("10s", key="every"))
    age.begin(0, now=0.0)
    told = []
    for now in range(16, 200, 20):  # each is committed 20 s after the one before
        told.append(age.late(0, float(now)))
        age.committed(0, seconds_ago=1.0, now=float(now))
    assert [message is not None for message in told] == [True] + [False] * 9
    assert told[0] == "no checkpoint has been committed yet, 16.0 s after the start, but one is due every 10s"
    age.committed(0, seconds_ago=0.0, now=200.0)
    assert "16.0 s old, but one is due every 10s" in (age.late(0, 216.0) or "")


def test_before_the_first_checkpoint_of_a_run_none_is_said_to_be_old() -> None:
    age = Age(Duration.parse(5, key="every"))
    age.begin(0, now=0.0)
    assert age.late(8, 1.0) == (
        "no checkpoint has been committed yet, 8 steps after the start, but one is due every 5 steps"
    )


def test_without_an_interval_nothing_is_late() -> None:
    age = Age(None)
    age.begin(0, 0.0)
    assert age.late(10**9, 1e9) is None


def test_a_save_longer_than_the_grace_period_is_news_once_until_it_fits_again() -> None:
    grace = Grace(30.0)
    answers = [grace.takes(seconds, "the last save took") for seconds in (29.0, 31.0, 40.0, 20.0, 31.0)]
    assert [answer is not None for answer in answers] == [False, True, False, False, True]
    assert "the last save took 31.0 s" in (answers[1] or "") and "grace is 30 s" in (answers[1] or "")
    assert Grace(None).takes(1e9, "it took") is None


def test_the_last_save_of_earlier_attempts_is_found_in_the_journal(tmp_path: Path) -> None:
    assert last_save_seconds(tmp_path, 1) is None
    for attempt, seconds in ((1, 5.0), (2, 7.0), (3, None)):
        journal = Journal(tmp_path / f"att-{attempt:04d}" / "rank0.jsonl", attempt)
        if seconds is not None:
            journal.event("save_committed", stall_seconds=0.5, persist_seconds=1.0)
            journal.event("save_committed", stall_seconds=0.5, persist_seconds=seconds, upload_seconds=2.0)
        journal.event("end")
        journal.close()
    with (tmp_path / "att-0003" / "rank0.jsonl").open("a") as file:
        file.write('{"ev": "save_committed", "torn')
    assert last_save_seconds(tmp_path, 4) == 7.5  # the upload is part of what it took to persist
    assert last_save_seconds(tmp_path, 2) == 5.5


@pytest.mark.parametrize("remote", [5, "", "s3:/bucket/runs", "foo://bucket", "http://host/runs"])
def test_a_remote_place_that_is_none_is_refused_before_anything_runs(remote: object) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.async_checkpoint\.remote="):
        AsyncCheckpointCallback(remote=remote)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("remote", "meant"),
    [("s3:/bucket/runs", "s3://bucket/runs"), ("S3:/b", "S3://b"), ("s3a:/b", "s3a://b"), ("file:/a/b", "file:///a/b")],
)
def test_a_url_without_its_second_slash_is_told_as_it_was_meant(remote: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean {meant}[?]"):
        AsyncCheckpointCallback(remote=remote)


def test_the_best_by_a_metric_are_none_where_nothing_is_measured() -> None:
    assert "the best 1 by 'top9'" in (never_best(Keep(best=1, metric="top9"), has_metrics=False) or "")
    assert never_best(Keep(best=1, metric="top9"), has_metrics=True) is None
    assert never_best(Keep(last=1), has_metrics=False) is None


def test_sizes_are_in_the_unit_that_fits() -> None:
    sizes = [words_of(size) for size in (0, 900, 12_345, 999_960, 2_340_000, 5e12)]
    assert sizes == ["0 bytes", "900 bytes", "12.3 kB", "1.0 MB", "2.3 MB", "5,000.0 GB"]
