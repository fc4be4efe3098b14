from __future__ import annotations

from pathlib import Path

import pytest

from framework.checkpoint import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")
