"""A user's folder with a recipe of its own, and helpers that compose in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from framework.config import build_callbacks, build_recipe, check, compose
from framework.errors import ConfigError
from tests.config.helpers import forget_recipes, tree, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user with the recipe `mine`; the import state is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    forget_recipes()
    write(tmp_path)
    yield tmp_path
    forget_recipes()


@pytest.fixture
def refused(folder: Path) -> Callable[..., str]:
    """Composes, checks and builds; returns the message of the refusal, which left nothing on disk."""

    def message(*words: str) -> str:
        before = tree(folder)
        with pytest.raises(ConfigError) as caught:
            config = compose(words)
            check(config)
            build_recipe(config)
            build_callbacks(config)
        assert tree(folder) == before
        return str(caught.value)

    return message
