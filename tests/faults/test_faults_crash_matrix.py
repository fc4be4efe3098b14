"""Killed at any system call of sweep, save, commit and retention, a process leaves nothing but whole checkpoints.

A sample of the calls runs always, all of them under `make soak`.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_support import SOLO, make_writer, small_state, solo_group
from fault_support import KEEP, assert_all_whole, assert_restores, attempt, beginning, renewed
from syscalls import Outcome, supervise

from framework.checkpoint import CheckpointStore, SaveHeader
from framework.errors import FrameworkError

pytestmark = pytest.mark.usefixtures("supervised")
MOST = 2000  # calls of one attempt; more would be a fault of the test


def saving(path: Path) -> None:
    """Attempt 2: saves 2 once more, 3, of which there are left-overs, and 4; 1 and 2 are retired."""
    attempt(path, 2, [2, 3, 4], world=SOLO, group=solo_group())


def published(outcome: Outcome) -> int:
    """The newest step that must be there, from the calls that were made."""
    made = outcome.calls[:-1] if outcome.code < 0 else outcome.calls
    return [2, 2, 3, 4][sum(name == "rename" and Path(path).name == ".metadata" for name, path in made)]


def numbers(first: int, every: int) -> Iterator[int]:
    return iter(range(first, MOST, every))


def killed_everywhere(source: Path, folder: Path, first: int, every: int) -> list[Outcome]:
    """Kills `saving` at each of these calls, in a fresh copy each time, and sees that all is well after it."""
    outcomes = []
    for number in numbers(first, every):
        path = renewed(source, folder / "checkpoints")
        outcome = supervise(lambda path=path: saving(path), path, stop_at=number)
        outcomes.append(outcome)
        store = CheckpointStore(path)
        newest = assert_all_whole(store)
        assert newest == published(outcome), f"call {number}, {outcome.calls[-1]}"
        assert outcome.code in (0, -signal.SIGKILL), f"call {number}, {outcome.calls[-1]}"
        attempt(path, 3, [newest + 1], world=SOLO, group=solo_group())
        assert assert_all_whole(store) == newest + 1
        assert assert_restores(path, SOLO, solo_group(), small_state) == newest + 1
        assert_nothing_else(store)
        if outcome.code == 0:
            break
    return outcomes


def assert_nothing_else(store: CheckpointStore) -> None:
    """No left-overs: two checkpoints, and in their folders what their manifests name."""
    found = store.list()
    assert len(found) == 2
    assert {path.name for path in store.path.iterdir() if path.is_dir()} == {one.path.name for one in found}
    for one in found:
        assert len(os.listdir(one.path)) == len(one.manifest.files) + 2


def test_killed_at_any_call_of_an_attempt_it_leaves_whole_checkpoints(quick: Path) -> None:
    outcomes = killed_everywhere(beginning(quick / "source"), quick, first=2, every=4)
    assert len(outcomes) > 15 and outcomes[-1].code == 0
    names = {name for name, _ in outcomes[-1].calls}
    assert names >= {"open", "write", "fsync", "fallocate", "mkdir", "rename", "unlink", "rmdir"}, outcomes[-1].calls


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_every_call_of_an_attempt_it_leaves_whole_checkpoints(quick: Path) -> None:
    outcomes = killed_everywhere(beginning(quick / "source"), quick, first=1, every=1)
    assert len(outcomes) > 60 and outcomes[-1].code == 0


def failing_everywhere(source: Path, folder: Path, first: int, every: int) -> list[Outcome]:
    """Lets `saving` get an error from each of these calls; whatever it makes of it, no checkpoint is wrong or lost."""
    outcomes = []
    for number in numbers(first, every):
        path = renewed(source, folder / "checkpoints")
        error = (errno.EIO, errno.ENOSPC)[number // every % 2]
        outcome = supervise(lambda path=path: saving_or_saying(path), path, stop_at=number, error=error)
        outcomes.append(outcome)
        where = f"call {number}, {outcome.calls[:number][-1]}"
        store = CheckpointStore(path)
        assert assert_all_whole(store) >= (4 if outcome.code == 0 else 2), where
        assert outcome.code in (0, SAID), where
        attempt(path, 3, [5], world=SOLO, group=solo_group())
        assert assert_restores(path, SOLO, solo_group(), small_state) == 5
        if len(outcome.calls) < number:
            break
    return outcomes


SAID = 17


def saving_or_saying(path: Path) -> None:
    """Saves as `saving` does; a failed save must name path and cause, then the same step is saved again."""
    store = CheckpointStore(path)
    try:
        store.sweep(2)
        writer = make_writer(store, attempt=2, keep=KEEP)
        writer.prepare(small_state(0))
    except (FrameworkError, OSError) as error:
        assert str(path) in str(error), error
        os._exit(SAID)
    failed = 0
    for step in (3, 4):
        for _ in range(2):
            writer.start(small_state(step), SaveHeader(step))
            (result,) = writer.wait(60)
            if result.committed:
                break
            assert result.error is not None and str(path) in result.error
            assert os.strerror(errno.EIO) in result.error or os.strerror(errno.ENOSPC) in result.error, result.error
            failed += 1
        assert result.committed and failed < 2, result.error


def test_an_error_of_any_call_of_an_attempt_loses_no_checkpoint(quick: Path) -> None:
    outcomes = failing_everywhere(beginning(quick / "source"), quick, first=3, every=5)
    assert len(outcomes) > 12 and outcomes[-1].code == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_error_of_every_call_of_an_attempt_loses_no_checkpoint(quick: Path) -> None:
    outcomes = failing_everywhere(beginning(quick / "source"), quick, first=1, every=1)
    assert len(outcomes) > 60 and outcomes[-1].code == 0
