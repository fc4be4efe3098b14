from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import CheckpointStore
from framework.checkpoint.__main__ import main


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command with --json and returns what it printed; the exit code must be the one given."""

    def run(*words: str | Path, code: int = 0) -> Any:
        assert main([*map(str, words), "--json"]) == code, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run
