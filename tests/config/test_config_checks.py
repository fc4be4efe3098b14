"""What is refused before any data or GPU is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.config import check, compose
from framework.config.places import built_in_configs
from framework.settings import LoaderSettings, ParallelSettings, RunSettings, TrainerSettings
from tests.config.helpers import CONFIG, RECIPE, write

MINE = "+recipe=mine"


def test_train_yaml_holds_every_typed_key_with_its_default() -> None:
    written = yaml.safe_load((built_in_configs() / "train.yaml").read_text())
    written["parallel"] = yaml.safe_load((built_in_configs() / "parallel" / "ddp.yaml").read_text())
    groups = {"run": RunSettings, "trainer": TrainerSettings, "loader": LoaderSettings, "parallel": ParallelSettings}
    for name, cls in groups.items():
        assert written[name] == asdict(cls()), name


def test_the_defaults_compose_into_the_typed_settings(folder: Path) -> None:
    settings = check(compose([MINE]))
    assert settings.trainer == TrainerSettings(max_steps=5, global_batch_size=8)
    assert settings.loader == LoaderSettings()
    assert settings.parallel == ParallelSettings()
    assert settings.run == RunSettings(name="mine", dir="runs/mine")
    assert settings.seed == 0


@pytest.mark.parametrize("recipe", ["toy", "imagenet_resnet"])
def test_built_in_recipes_pass(folder: Path, recipe: str) -> None:
    check(compose([f"+recipe={recipe}"]))


@pytest.mark.parametrize("world", ["1", "2", "4", "8"])
def test_imagenet_fits_the_usual_numbers_of_ranks(folder: Path, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    check(compose(["+recipe=imagenet_resnet"]))
    real = compose(["+recipe=imagenet_resnet", 'data.root="/a,b/(1)"'])
    assert check(real).trainer.global_batch_size == 1024
    assert real.values["model"]["depth"] == 50 and real.values["data"]["train"]["scale"] == [0.08, 1.0]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("model.depht=50", ["model", "depht", "Did you mean 'depth'?"]),
        ("+model.lrr=1", ["model.lrr", "recipes.mine.net", "recipes/mine.py:12"]),
        ("++model.newk=4", ["model.newk", "recipes.mine.net"]),
        ("model={dpth: 5}", ["model", "Did you mean 'depth'?"]),
        ("recipe.smothing=1", ["recipe", "Did you mean 'smoothing'?"]),
        ("+recipe.smothing=1", ["recipe.smothing", "Did you mean 'smoothing'?"]),
        ("+recipe.train_data=1", ["recipe", "supplies train_data"]),
        ("optimizer.params=3", ["optimizer", "supplies params"]),
        ("optimizer.lrr=3", ["optimizer", "Did you mean 'lr'?"]),
        ("lr=3", ["no key 'lr' in the config", "Did you mean 'optimizer.lr'?"]),
        ("data.train.transform.sise=3", ["data.train.transform", "Did you mean 'size'?"]),
        ("+data.train.transform.sise=3", ["data.train.transform.sise", "Did you mean 'size'?"]),
        ("data.rot=x", ["data", "Did you mean 'root'?"]),
        ("+data.rot=x", ["data.rot", "Did you mean 'root'?"]),
        ("callbacks.mlflw.experiment=x", ["callbacks", "Did you mean 'mlflow'?"]),
        ("+callbacks.mlflw.experiment=x", ["callbacks.mlflw", "Did you mean 'mlflow'?"]),
        ("callbacks.mlflow.experimnt=x", ["callbacks.mlflow", "Did you mean 'experiment'?"]),
        ("trainer.max_stps=5", ["trainer", "Did you mean 'max_steps'?"]),
        ("+trainer.max_stps=5", ["trainer.max_stps", "Did you mean 'max_steps'?"]),
        ("traner.max_steps=5", ["traner", "Did you mean 'trainer'?"]),
        ("+traner.max_steps=5", ["traner", "Did you mean 'trainer'?"]),
        ("+sed=5", ["sed", "Did you mean 'seed'?"]),
    ],
)
def test_misspelt_keys_are_refused_by_name(refused: Callable[..., str], word: str, parts: list[str]) -> None:
    message = refused(MINE, word)
    for part in parts:
        assert part in message


def test_keys_of_ones_own_are_allowed_where_something_refers_to_them(folder: Path) -> None:
    config = compose(
        [MINE, "+width=7", "model.width=${width}", "+data.size=3", "data.train.transform.size=${data.size}"]
    )
    check(config)
    assert config.values["model"]["width"] == 7 and config.values["data"]["train"]["transform"]["size"] == 3


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("trainer.max_steps=abc", "a whole number, not str"),
        ("trainer.max_steps=1.5", "a whole number"),
        ("trainer.max_steps=true", "a whole number, not bool"),
        ("trainer.max_steps=0", "at least 1"),
        ("trainer.max_epochs=0", "greater than 0"),
        ("trainer.max_epochs=nan", "a number"),
        ("trainer.global_batch_size=null", "a whole number"),
        ("trainer.clip_norm=-1", "greater than 0"),
        ("trainer.ema_decay=1", "smaller than 1"),
        ("trainer.precision=fp8", "fp32, bf16, fp16"),
        ("trainer.precision=16", "fp32, bf16, fp16"),
        ("trainer.device=cdua", "Did you mean 'cuda'?"),
        ("trainer.eval_every=10min", "trainer.eval_every='10min'"),
        ("trainer.eval_every=ofen", "is not a duration"),
        ("trainer.max_time=100", "trainer.max_time='100'"),
        ("trainer.timeout=null", "trainer.timeout=None"),
        ("trainer.channels_last=maybe", "true or false"),
        ("trainer={max_steps: x}", "trainer.max_steps='x'"),
        ("trainer=null", "Nothing says how long to train"),
        ("trainer=5", "must be a mapping"),
        ("loader.num_workers=-1", "at least 0"),
        ("loader.epoch_end=1", "carry, drop"),
        ("loader.position=shard", "offset"),
        ("run.resume=maybe", "auto, must, never"),
        ("run.allow=seed", "run.allow=[seed]"),
        ("parallel.strategy=dpp", "Did you mean 'ddp'?"),
        ("parallel=fsdp", "ddp"),
        ("seed=-1", "seed=-1"),
        ("seed=x", "seed='x'"),
        ("optimizer.lr=abc", "optimizer.lr='abc'"),
        ("optimizer=null", "optimizer is missing"),
        ("optimizer=adam", "must be a mapping with a _target_"),
        ("~model.depth", "needs depth"),
        ("trainer.max_steps=null", "Nothing says how long to train"),
        ("callbacks.async_checkpoint.every=ofen", "callbacks.async_checkpoint.every"),
        ("callbacks.progress=5", "callbacks.progress=5"),
        ("model._target_=recipes.mine", "not something that can be called"),
        ("recipe._target_=recipes.mine.net", "recipe"),
        ("recipe._target_=recipes.mine.Data", "no subclass of framework.Recipe"),
        ("callbacks.progress={_target_: recipes.mine.Data}", "no subclass of framework.Callback"),
    ],
)
def test_wrong_values_are_refused_by_key(refused: Callable[..., str], word: str, part: str) -> None:
    assert part in refused(MINE, word)


@pytest.mark.parametrize(
    ("word", "group", "key", "value"),
    [
        ("trainer.max_steps=1e3", "trainer", "max_steps", 1000),
        ("trainer.eval_every=50", "trainer", "eval_every", "50"),
        ("trainer.eval_every=null", "trainer", "eval_every", None),
        ("trainer.max_epochs=2", "trainer", "max_epochs", 2.0),
        ("trainer.compile={mode: default}", "trainer", "compile", {"mode": "default"}),
        ("loader.timeout=30s", "loader", "timeout", "30s"),
        ("run.allow=[seed]", "run", "allow", ["seed"]),
    ],
)
def test_right_values_arrive_with_their_types(folder: Path, word: str, group: str, key: str, value: Any) -> None:
    read = getattr(getattr(check(compose([MINE, word])), group), key)
    assert read == value and type(read) is type(value)


def test_all_problems_are_told_at_once(refused: Callable[..., str]) -> None:
    message = refused(MINE, "trainer.precision=fp8", "+model.lrr=1", "loader.num_workers=-1", "optimizer.lr=-1")
    for key in ("trainer.precision", "model.lrr", "loader.num_workers", "optimizer.lr"):
        assert key in message


@pytest.mark.parametrize(
    ("world", "words", "numbers"),
    [
        (
            "3",
            ["trainer.global_batch_size=100", "trainer.micro_batch_size=8"],
            ["100", "world size 3", "=8", "24", "96 or 120"],
        ),
        ("3", ["trainer.global_batch_size=8"], ["8", "world size 3", "6 or 9"]),
        ("1", ["trainer.global_batch_size=4", "trainer.micro_batch_size=8"], ["4", "8"]),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_the_numbers(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, world: str, words: list[str], numbers: list[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    message = refused(MINE, *words)
    assert "trainer.global_batch_size" in message
    for number in numbers:
        assert number in message


def test_open_signatures_take_any_added_key_but_suggest_on_a_change(folder: Path, refused: Callable[..., str]) -> None:
    write(folder, RECIPE.replace("width: int = 4", "width: int = 4, **more"))
    check(compose([MINE, "+model.anything=1"]))
    assert "Did you mean 'depth'?" in refused(MINE, "model.depht=1")


def test_a_recipe_that_builds_its_own_needs_no_factory(folder: Path) -> None:
    own = RECIPE.replace(
        "        self.smoothing = smoothing\n", "        self.smoothing = smoothing\n    def build_model(self): ...\n"
    )
    write(folder, own, CONFIG.replace("model: {_target_: recipes.mine.net, depth: 3}", "model: null"))
    check(compose([MINE]))


def test_several_optimizers_are_checked_one_by_one(folder: Path, refused: Callable[..., str]) -> None:
    two = "optimizer: {a: {_target_: torch.optim.SGD, lr: 1}, b: {_target_: torch.optim.AdamW, lr: -2, momentum: 1}}"
    lines = [two if line.startswith("optimizer") else line for line in CONFIG.splitlines()]
    write(folder, config="\n".join(lines))
    message = refused(MINE)
    assert "optimizer.b.lr=-2" in message and "optimizer.b.momentum" in message and "optimizer.a" not in message
