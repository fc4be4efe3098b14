"""What becomes of a `_target_`, and how its errors are shown."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework import train
from framework.config import Factory, build_recipe, check, compose
from framework.errors import BuildError, ConfigError, DataError, FrameworkError
from framework.recipe import Recipe
from tests.config.helpers import CONFIG, RECIPE, tree, write

MINE = "+recipe=mine"
DEMANDING = """

class Demanding(Exception):
    def __init__(self, code, *, reason):
        super().__init__(f"code {code}, reason {reason}")


def fails(depth: int, width: int = 4):
    raise KIND
"""


def recipe_of(*words: str) -> Any:
    config = compose([MINE, *words])
    check(config)
    return build_recipe(config)


def test_the_recipe_gets_factories_and_its_own_arguments(folder: Path) -> None:
    recipe = recipe_of("recipe.smoothing=0.3", "model.width=2")
    assert isinstance(recipe, Recipe) and recipe.smoothing == 0.3  # type: ignore[attr-defined]
    model = recipe.build_model()
    assert isinstance(model, nn.Linear) and model.weight.shape == (2, 3)
    optimizer = recipe.build_optimizer(model)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["nesterov"] is True
    assert recipe.build_train_data() == [None, ("transform", 1), None]
    assert recipe.build_eval_data() is None
    assert recipe.schedule is None


def test_each_call_builds_anew_from_plain_containers(folder: Path) -> None:
    recipe = recipe_of("data.train.options={a: [1, 2]}")
    first, second = recipe.build_train_data(), recipe.build_train_data()
    assert type(first[2]) is dict and type(first[2]["a"]) is list
    first[2]["a"].append(3)
    assert second[2] == {"a": [1, 2]} == recipe.build_train_data()[2]


def test_several_evaluation_sets_and_optimizers_are_mappings(folder: Path) -> None:
    lines = [
        "optimizer: {weight: {_target_: torch.optim.SGD, lr: 1}, bias: {_target_: torch.optim.AdamW}}"
        if line.startswith("optimizer")
        else line
        for line in CONFIG.splitlines()
    ]
    write(folder, config="\n".join(lines))
    config = compose([MINE, "data.eval={a: {_target_: recipes.mine.Data, root: x}, b: {_target_: recipes.mine.Data}}"])
    check(config)
    recipe = build_recipe(config)
    assert recipe.build_eval_data() == {"a": ["x", None, None], "b": [None, None, None]}
    factories: Any = recipe._optimizer
    assert list(factories) == ["weight", "bias"]
    assert isinstance(factories["bias"]([nn.Parameter(torch.zeros(1))]), torch.optim.AdamW)


def test_partial_and_positional_arguments_of_nested_nodes(folder: Path) -> None:
    node = "{_target_: recipes.mine.transform, _partial_: true, _args_: [7]}"
    built = recipe_of(f"data.train.options={node}").build_train_data()[2]
    assert built() == ("transform", 7)


def test_schedulers_of_torch_are_known_by_their_class(folder: Path) -> None:
    recipe = recipe_of("schedule={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}")
    assert recipe.schedule.target is torch.optim.lr_scheduler.StepLR


def test_factories_can_be_sent_to_other_processes(folder: Path) -> None:
    factory = Factory("model", nn.Linear, {"in_features": 2, "out_features": 3})
    assert pickle.loads(pickle.dumps(factory)).__call__().weight.shape == (3, 2)


def broken(folder: Path, kind: str) -> list[str]:
    """A folder whose model fails in one of the five ways; the words that show it."""
    recipe, words = RECIPE, [MINE]
    if kind == "typo":
        words.append("model._target_=recipes.mine.nett")
    elif kind == "no module":
        words.append("model._target_=recipes.mien.net")
    elif kind == "syntax":
        recipe += "\nx = = 1\n"
    elif kind == "missing package":
        recipe += "\nimport a_package_that_is_not_there\n"
    elif kind == "wrong argument":
        words.append("+model.layers=3")
    elif kind == "import fails":
        recipe += "\n{}['absent']\n"
    write(folder, recipe)
    return words


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("typo", ["model", "recipes.mine.nett", "Did you mean 'net'?"]),
        ("no module", ["model", "recipes.mien.net", "Did you mean 'mine'?"]),
        ("syntax", ["recipe", "recipes.mine.Mine", "SyntaxError: invalid syntax", "recipes/mine.py:24"]),
        (
            "missing package",
            ["model", "recipes.mine.net", "ModuleNotFoundError", "a_package_that_is_not_there", "recipes/mine.py:24"],
        ),
        ("import fails", ["model", "recipes.mine.net", "KeyError: 'absent'", "recipes/mine.py:24"]),
        ("wrong argument", ["model", "recipes.mine.net", "layers", "recipes/mine.py:12"]),
    ],
)
def test_a_broken_target_shows_the_real_cause(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, parts: list[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    words = broken(folder, kind)
    before = tree(folder)
    assert train.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    for part in parts:
        assert part in error
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("raised", "kind", "parts"),
    [
        ("Demanding(3, reason='tired')", BuildError, ["Demanding: code 3, reason tired"]),
        ("ValueError('no such depth')", ConfigError, ["ValueError: no such depth"]),
        ("RuntimeError('no memory')", BuildError, ["RuntimeError: no memory"]),
    ],
)
def test_an_error_inside_a_model_keeps_its_type_and_line(
    folder: Path, raised: str, kind: type[FrameworkError], parts: list[str]
) -> None:
    write(folder, RECIPE + DEMANDING.replace("KIND", raised))
    recipe = recipe_of("model._target_=recipes.mine.fails")
    with pytest.raises(FrameworkError) as caught:
        recipe.build_model()
    assert type(caught.value) is kind
    assert caught.value.__cause__ is not None and type(caught.value.__cause__).__name__ in parts[0]
    for part in ["model: recipes.mine.fails", "recipes/mine.py:31", *parts]:
        assert part in str(caught.value)


def test_an_exception_whose_text_fails_is_still_shown(folder: Path) -> None:
    mute = "\nclass Mute(Exception):\n    def __str__(self): raise TypeError\ndef fails(depth): raise Mute\n"
    write(folder, RECIPE + mute)
    with pytest.raises(BuildError, match=r"Mute"):
        recipe_of("model._target_=recipes.mine.fails").build_model()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("optimizer", ConfigError), ("schedule", ConfigError), ("data.train", BuildError), ("callbacks.x", ConfigError)],
)
def test_the_kind_of_error_follows_from_the_place(path: str, kind: type[FrameworkError]) -> None:
    def fails() -> None:
        raise OSError("gone")

    with pytest.raises(kind, match=f"{path}: .*fails failed") as caught:
        Factory(path, fails, {})()
    assert isinstance(caught.value.__cause__, OSError)


def test_errors_of_the_framework_pass_unchanged() -> None:
    error = DataError("empty")

    def fails() -> None:
        raise error

    with pytest.raises(DataError) as caught:
        Factory("data.train", fails, {})()
    assert caught.value is error


def test_a_call_that_never_got_inside_shows_the_definition(folder: Path) -> None:
    recipe = recipe_of()
    from recipes.mine import net  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match=r"(?s)missing 1 required.*recipes/mine.py:12"):
        Factory("model", net, {})()
    assert recipe.build_model() is not None


def test_a_failing_recipe_constructor_is_named(folder: Path, refused: Callable[..., str]) -> None:
    write(folder, RECIPE.replace("self.smoothing = smoothing", "raise LookupError('bad')"))
    message = refused(MINE)
    assert "recipe: recipes.mine.Mine failed" in message
    assert "LookupError: bad" in message and "recipes/mine.py:9" in message


def test_a_failing_callback_constructor_is_named(folder: Path, refused: Callable[..., str]) -> None:
    own = "from framework import Callback\nclass Own(Callback):\n    def __init__(self): raise OSError('bad')\n"
    (folder / "own_callbacks.py").write_text(own)
    message = refused(MINE, "+callbacks.mine._target_=own_callbacks.Own")
    assert "callbacks.mine: own_callbacks.Own failed" in message
    assert "OSError: bad" in message and "own_callbacks.py:3" in message
