"""Fixtures of all tests: whatever a test starts is ended with it, and nothing may be left."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import processes, start
from support.faultfs import faultfs as faultfs
from support.storage import s3 as s3


def pytest_configure(config: pytest.Config) -> None:
    """Chooses what tests and their processes inherit: an own place for caches, not the user's, and Ctrl-C.

    A shell that starts a job in the background lets it ignore Ctrl-C, and so all that the job starts.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    caches = tempfile.TemporaryDirectory(prefix="caches-of-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(caches.cleanup)
    os.environ["XDG_CACHE_HOME"] = caches.name


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """Ends the runs of a test; fails if one of their processes outlived its run."""
    yield
    left = processes.clean()
    assert not left, f"processes were left running: {left}"


@pytest.fixture(scope="session", autouse=True)
def _warm_process() -> Iterator[None]:
    """Ends the warm process with the session."""
    yield
    processes.stop()


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`unbroken("+recipe=job", "trainer.max_steps=60", ranks=2)` is the run directory of that run, never stopped.

    It is made once a session for the same words and ranks. Do not change it.
    """
    done: dict[tuple[object, ...], Path] = {}

    def run(*words: str, ranks: int = 1, timeout: float = processes.WAIT_SECONDS) -> Path:
        key = (*words, ranks)
        if key not in done:
            folder = tmp_path_factory.mktemp("unbroken")
            start(*words, "run.name=u", cwd=folder, ranks=ranks).ends(0, timeout)
            done[key] = folder / "runs" / "u"
        return done[key]

    return run
