"""Fixtures of all tests: whatever a test starts is ended with it, and nothing may be left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import processes


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
