"""What the words of a command line become."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from framework.config import build_callbacks, check, compose, resolved
from tests.config.helpers import CONFIG, RECIPE, tree, write

MINE = "+recipe=mine"
DEFAULT_CALLBACKS = [
    "auto_resume", "rng_state", "data_position", "async_checkpoint", "goodput", "data_meter", "progress", "mlflow", "preemption", "non_finite",
]  # fmt: skip


def test_own_and_built_in_recipes_are_found_together(folder: Path) -> None:
    check(compose([MINE]))
    check(compose(["+recipe=toy"]))


def test_own_recipes_with_an_init_file_join_the_built_in_ones(folder: Path) -> None:
    (folder / "recipes" / "__init__.py").write_text("")
    check(compose(["+recipe=toy"]))
    check(compose([MINE]))


def test_own_files_come_before_built_in_ones(folder: Path) -> None:
    write(folder, RECIPE, CONFIG.replace("recipes.mine", "recipes.toy"), "toy")
    assert compose(["+recipe=toy"]).values["recipe"]["_target_"] == "recipes.toy.Mine"
    check(compose(["+recipe=toy"]))


def test_a_broken_init_file_of_own_recipes_is_shown_with_its_line(refused: Callable[..., str], folder: Path) -> None:
    (folder / "recipes" / "__init__.py").write_text("\nraise OSError('no disk')\n")
    message = refused(MINE)
    assert "OSError: no disk" in message and "recipes/__init__.py:2" in message


def test_nothing_is_written_and_the_folder_stays_when_composing(folder: Path) -> None:
    before = tree(folder)
    config = compose([MINE, "hydra.job.chdir=True", "hydra.run.dir=elsewhere", "data.root=data"])
    check(config)
    assert tree(folder) == before
    assert Path.cwd() == folder
    assert config.values["data"]["train"]["root"] == "data"
    assert config.values == compose([MINE, "data.root=data"]).values
    assert len(config.notes) == 2 and all("has no effect" in note for note in config.notes)


def test_the_same_words_name_the_same_run(folder: Path) -> None:
    first, second = compose([MINE, "optimizer.lr=0.2"]), compose([MINE, "optimizer.lr=0.2"])
    assert first == second
    assert first.run_dir == Path("runs/mine") and first.notes == ()


def test_a_name_with_the_time_in_it_is_announced(folder: Path) -> None:
    notes = compose([MINE, "run.name=${now:%Y-%m-%d_%H-%M-%S}"]).notes
    assert len(notes) == 1 and "none is ever resumed" in notes[0]


@pytest.mark.parametrize("name", ["2024_01_02", "true", "null", "1e3", "007", "00:30", "é(1), b", "a=b", "[x]", "off"])
@pytest.mark.parametrize("key", ["name", "root", "dir"])
def test_names_and_folders_are_taken_as_typed(folder: Path, key: str, name: str) -> None:
    config = compose([MINE, f"run.{key}={name}"])
    assert config.values["run"][key] == name
    assert getattr(check(config).run, key) == name
    assert name in config.run_dir.parts
    saved = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(config.values)))
    assert saved.run[key] == name


def test_quotes_for_the_parser_are_not_part_of_a_name(folder: Path) -> None:
    config = compose([MINE, 'run.dir="my runs/é(1)"', "run.name='a,b'"])
    assert config.values["run"]["dir"] == "my runs/é(1)" and config.values["run"]["name"] == "a,b"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", " a", "a\nb", "a" * 256])
def test_names_that_are_no_folder_names_are_refused(refused: Callable[..., str], name: str) -> None:
    assert "run.name=" in refused(MINE, f"run.name={name}")


def test_a_number_as_a_name_in_a_file_is_refused(refused: Callable[..., str], folder: Path) -> None:
    write(folder, config=CONFIG + "run: {name: 2024_01_02}\n")
    assert "run.name=20240102 must be text" in refused(MINE)


def test_the_home_folder_is_no_folder_called_tilde(folder: Path) -> None:
    assert compose([MINE, "run.root=~/runs"]).values["run"]["dir"] == os.path.expanduser("~/runs/mine")


@pytest.mark.parametrize(
    ("typed", "value"), [("1e-3", 1e-3), ("1E-3", 1e-3), ("1.e-3", 1e-3), (".5", 0.5), ("1e-5", 1e-5)]
)
def test_rates_are_floats_from_everywhere(folder: Path, typed: str, value: float) -> None:
    write(folder, config=CONFIG.replace("1e-1", typed), name="other")
    for words in ([MINE, f"optimizer.lr={typed}"], ["+recipe=other"]):
        config = compose(words)
        check(config)
        saved = yaml.safe_dump(resolved(config))
        for rate in (
            config.values["optimizer"]["lr"],
            yaml.safe_load(saved)["optimizer"]["lr"],
            OmegaConf.create(saved).optimizer.lr,
        ):
            assert type(rate) is float and rate == value


def test_a_negative_rate_is_refused(refused: Callable[..., str]) -> None:
    assert "optimizer.lr=-0.001" in refused(MINE, "optimizer.lr=-1e-3")


def test_a_recipe_without_plus_shows_the_right_command(refused: Callable[..., str]) -> None:
    message = refused("recipe=mine", "optimizer.lr=1", "run.name=my run")
    assert message.endswith("python -m framework.train +recipe=mine optimizer.lr=1 'run.name=my run'")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("words", [["+recipe=imagenet_resnett"], ["recipe=imagenet_resnett"]])
def test_an_unknown_recipe_lists_all_that_are_found(refused: Callable[..., str], words: list[str]) -> None:
    message = refused(*words)
    assert "imagenet_resnett" in message
    assert "yours: mine" in message and "built-in: imagenet_resnet, toy" in message


def test_a_missing_recipe_lists_all_that_are_found(refused: Callable[..., str]) -> None:
    message = refused("optimizer.lr=3")
    assert "+recipe=NAME" in message and "yours: mine" in message


def test_a_recipe_file_without_its_package_line_is_explained(refused: Callable[..., str], folder: Path) -> None:
    write(folder, config=CONFIG.replace("# @package _global_\n", ""))
    assert "# @package _global_" in refused(MINE)


def test_several_values_without_a_sweep_are_explained(refused: Callable[..., str]) -> None:
    message = refused(MINE, "optimizer.lr=0.1,0.2")
    assert "optimizer.lr=0.1,0.2" in message and "-m" in message and len(message.splitlines()) == 1


def test_a_misspelt_hydra_key_is_refused(refused: Callable[..., str]) -> None:
    assert "Did you mean 'output_subdir'?" in refused(MINE, "hydra.ouput_subdir=x")
    assert "Did you mean 'chdir'?" in refused(MINE, "+hydra.job.chdirr=x")


def test_an_unreadable_word_shows_the_quoted_form(refused: Callable[..., str]) -> None:
    message = refused(MINE, "model.depth=/a/epoch=3-step=9.pt")
    assert "'model.depth=\"/a/epoch=3-step=9.pt\"'" in message
    assert "no override" in refused(MINE, "trainer.max_steps")


def test_paths_arrive_unchanged(folder: Path) -> None:
    def root(text: str) -> Any:
        return compose([MINE, f"data.root={text}"]).values["data"]["train"]["root"]

    assert root("/data/my images/train") == "/data/my images/train"
    assert root('"/data/it(1),v2"') == "/data/it(1),v2"
    assert root("2024_01_02") == "2024_01_02"
    assert root("null") is None
    assert compose([MINE, "run.init_from=/a/epoch=3.pt"]).values["run"]["init_from"] == "/a/epoch=3.pt"


def test_environment_values_are_text_unless_decoded(
    folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "8")
    assert compose([MINE, "data.root=${oc.env:STEPS}/d"]).values["data"]["root"] == "8/d"
    assert check(compose([MINE, 'trainer.max_steps="${oc.decode:${oc.env:STEPS}}"'])).trainer.max_steps == 8
    assert "oc.decode" in refused(MINE, "trainer.max_steps=${oc.env:STEPS}")
    assert "NOT_THERE" in refused(MINE, "data.root=${oc.env:NOT_THERE}")


def test_callbacks_are_changed_removed_and_added(folder: Path) -> None:
    (folder / "own_callbacks.py").write_text(
        "from framework import Callback\n"
        "class Own(Callback):\n"
        "    def __init__(self, every=None, options=None):\n"
        "        self.every, self.options = every, options\n"
    )
    assert list(build_callbacks(compose([MINE]))) == DEFAULT_CALLBACKS
    words = ["~callbacks.mlflow", "callbacks.progress=null"]
    kept = [name for name in DEFAULT_CALLBACKS if name not in ("mlflow", "progress")]
    assert list(build_callbacks(compose([MINE, *words]))) == kept
    added = "+callbacks.mine={_target_: own_callbacks.Own, every: 5, options: {a: [1, 2]}}"
    built: dict[str, Any] = dict(build_callbacks(compose([MINE, *words, added])))
    assert list(built) == [*kept, "mine"]
    assert built["mine"].every == 5
    assert type(built["mine"].options) is dict and type(built["mine"].options["a"]) is list


def test_both_forms_of_a_callback_option_give_the_same_config(folder: Path) -> None:
    dotted = compose([MINE, "callbacks.async_checkpoint.every=50"])
    assert dotted.values == compose([MINE, "callbacks.async_checkpoint={every: 50}"]).values
    node = dotted.values["callbacks"]["async_checkpoint"]
    assert node["every"] == 50 and node["keep"] == 3
    assert build_callbacks(dotted)["async_checkpoint"]._interval.value == 50  # type: ignore[attr-defined]


def test_switching_the_optimizer_needs_no_plus(folder: Path) -> None:
    words = [
        "optimizer._target_=torch.optim.AdamW",
        "~optimizer.momentum",
        "~optimizer.nesterov",
        "optimizer.betas=[0.9,0.99]",
    ]
    config = compose([MINE, *words])
    check(config)
    assert config.values["optimizer"] == {"_target_": "torch.optim.AdamW", "lr": 0.1, "betas": [0.9, 0.99]}


def test_keys_left_over_from_the_old_target_are_named(refused: Callable[..., str]) -> None:
    message = refused(MINE, "optimizer._target_=torch.optim.AdamW")
    assert "momentum, nesterov of torch.optim.SGD" in message
    assert "~optimizer.momentum ~optimizer.nesterov" in message


def test_accepted_keys_that_are_not_in_the_file_need_no_plus(folder: Path) -> None:
    config = compose(
        [MINE, "model.width=9", "data.train.transform.size=4", "recipe.smoothing=0.2", "optimizer={dampening: 0.5}"]
    )
    assert config.values["model"]["width"] == 9
    assert config.values["data"]["train"]["transform"]["size"] == 4
    assert config.values["recipe"]["smoothing"] == 0.2
    assert config.values["optimizer"]["dampening"] == 0.5 and config.values["optimizer"]["momentum"] == 0.9


def test_removing_what_is_not_there_suggests_the_right_key(refused: Callable[..., str]) -> None:
    assert "Did you mean 'momentum'?" in refused(MINE, "~optimizer.momentun")


def test_a_schedule_is_set_and_unset(folder: Path) -> None:
    config = compose([MINE, "schedule._target_=framework.schedules.cosine", "schedule.warmup=5"])
    check(config)
    assert config.values["schedule"] == {"_target_": "framework.schedules.cosine", "warmup": 5}
    check(compose(["+recipe=toy", "schedule=null"]))


def test_own_search_path_and_groups_work(folder: Path) -> None:
    (folder / "more" / "recipe").mkdir(parents=True)
    (folder / "more" / "recipe" / "extra.yaml").write_text(CONFIG)
    config = compose(["+recipe=extra", f"hydra.searchpath=[file://{folder}/more]"])
    assert config.recipe_name == "extra"
