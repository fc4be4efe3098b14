"""Values of the wrong kind: one message each, with the key and the value, and nothing on disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import framework
from framework.config import build_recipe, check, compose
from framework.config.typed import DIFFERENCES
from framework.errors import BuildError, ConfigError


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("+recipe=mine", ["+recipe=toy and +recipe=mine", "two recipes"]),
        ("parallel=null", ["parallel=null", "name of a file in configs/parallel"]),
        ("parallel=5", ["parallel=5", "not 5"]),
        ("callbacks=null", ["callbacks=null", "~callbacks.NAME"]),
        ("callbacks=5", ["callbacks=5", "name of a file"]),
        ("run=5", ["run=5", "mapping"]),
        ("run=[1]", ["run=[1]", "mapping"]),
        ("callbacks.mlflow.tracking_uri=5", ["callbacks.mlflow.tracking_uri=5", "must be text"]),
        ("callbacks.mlflow.tracking_uri=[1]", ["callbacks.mlflow.tracking_uri=[1]", "must be text"]),
        ("run.allow={a: 1}", ["run.allow={'a': 1}", "must be a list"]),
        ("run.allow=[sed]", ["run.allow=[sed]", "'seed'", "finished"]),
        ("+trainer.max_epochs=4", ["+trainer.max_epochs=4", "there already", "trainer.max_epochs=4"]),
        ("callbacks.async_checkpoint.keep=abc", ["keep='abc'", "is no whole number"]),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(refused: Callable[..., str], word: str, parts: list[str]) -> None:
    message = refused("+recipe=toy", word)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("value", ["null", "5", "[1]"])
def test_a_recipe_that_is_no_name_is_refused(refused: Callable[..., str], value: str) -> None:
    assert f"recipe={value} must give the name" in refused(f"+recipe={value}")
    assert f"recipe={value}" in refused("+recipe=toy", f"recipe={value}")


def test_the_known_differences_are_those_that_are_asked_about() -> None:
    sources = [file.read_text() for file in Path(framework.__file__).parent.rglob("*.py")]
    asked = {name for text in sources for name in re.findall(r"\ballows\(\"(\w+)\"\)", text)}
    assert asked <= set(DIFFERENCES) and {"seed", "data", "finished"} <= asked
    assert check(compose(["+recipe=toy", f"run.allow=[{','.join(DIFFERENCES)}]"])).run.allow == list(DIFFERENCES)


def test_a_removal_of_what_the_replaced_target_never_had_is_noted(folder: Path) -> None:
    config = compose(["+recipe=toy", "optimizer._target_=torch.optim.Adam", "~optimizer.momentum"])
    assert config.values["optimizer"] == {"_target_": "torch.optim.Adam", "lr": 0.01}
    assert any("~optimizer.momentum has no effect" in note for note in config.notes)
    with pytest.raises(ConfigError, match=r"no key 'optimizer\.momentum' to remove"):
        compose(["+recipe=toy", "~optimizer.momentum"])


def test_arguments_that_a_dataset_does_not_take_are_an_error_of_the_config(folder: Path) -> None:
    words = ["+recipe=toy", "~data.train", "+data.train={_target_: builtins.range}"]
    with pytest.raises(ConfigError, match=r"data\.train: builtins\.range failed"):
        build_recipe(compose(words)).build_train_data()
    (folder / "own_callbacks.py").write_text("def data():\n    raise TypeError('inside')\n")
    with pytest.raises(BuildError, match="inside"):
        build_recipe(compose([*words[:2], "+data.train={_target_: own_callbacks.data}"])).build_train_data()
