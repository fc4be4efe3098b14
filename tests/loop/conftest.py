"""Trainers in the test process set process-wide switches of torch; each test leaves them as it found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loop.globals import process_state


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    with process_state():
        yield
