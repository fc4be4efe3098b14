"""Config and command line: HY-02, HY-06, HY-08, HY-10, HY-12."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from case_tools import MLFLOW, PARTS, mlflow_runs, tree
from PIL import Image
from support import committed_steps, events, kill_at, start


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer.lrr=1", ("optimizer.lrr", "Did you mean 'lr'?")),
        ("+optimizer.lrr=1", ("optimizer.lrr", "torch.optim.AdamW", "no parameter 'lrr'")),
        ("hydra.ouput_subdir=x", ("hydra.ouput_subdir", "Did you mean 'output_subdir'?")),
    ],
)
def test_hy_02_a_misspelt_key_is_refused_by_name(word: str, told: tuple[str, ...], tmp_path: Path) -> None:
    """Misspelt key: unclear, or accepted with + and ignored."""
    run = start("+recipe=job", word, cwd=tmp_path).ends(1)
    assert all(text in run.stderr() for text in told) and "Traceback" not in run.stderr()
    assert tree(tmp_path) == set()


def images(root: Path) -> list[str]:
    """Writes a few images below `root/train`; returns their paths."""
    for label in ("cat", "dog"):
        (root / "train" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (4, 4), (20 * number, 0, 0)).save(root / "train" / label / f"{number}.png")
    return sorted(str(path.resolve()) for path in root.rglob("*.png"))


PICTURES = (
    "+recipe=job", "+data.root=data", "~data.eval", "~data.train.samples", "~callbacks.ids",
    f"data.train={{_target_: {PARTS}.pictures, root: '${{data.root}}'}}", "trainer.max_steps=2", "run.name=r",
)  # fmt: skip


def opened(folder: Path) -> list[str]:
    """Files that the run of `folder` opened."""
    return sorted(set((folder / "opened").read_text().splitlines()))


@pytest.mark.parametrize("chdir", ["", "hydra.job.chdir=True", "hydra.job.chdir=False"])
def test_hy_06_relative_paths_are_those_of_the_launch(chdir: str, tmp_path: Path) -> None:
    """Relative data/checkpoint paths break when the job changes directory."""
    files = images(tmp_path / "data")
    words = (*PICTURES, *filter(None, [chdir]))
    start(*words, cwd=tmp_path, env={"OPENED": str(tmp_path / "opened")}).ends(0)
    assert opened(tmp_path) == files
    assert {path.split("/")[0] for path in tree(tmp_path)} == {"data", "opened", "runs"}
    assert committed_steps(tmp_path / "runs/r") == [2]

    words = (*words[:-1], "run.name=next", "run.init_from=runs/r/checkpoints/step_0000000002")
    start(*PICTURES[:-1], *words[len(PICTURES) - 1 :], cwd=tmp_path, env={"OPENED": str(tmp_path / "again")}).ends(0)
    assert committed_steps(tmp_path / "runs/next") == [2]


def test_hy_06_relative_paths_from_another_folder(tmp_path: Path) -> None:
    """Relative data paths break when the job is started from another folder."""
    files, other = images(tmp_path / "first/data"), tmp_path / "second"
    other.mkdir()
    words = (*PICTURES, "data.root=../first/data", "hydra.job.chdir=True")
    start(*words, cwd=other, env={"OPENED": str(tmp_path / "opened")}).ends(0)
    assert opened(tmp_path) == files
    assert {path.split("/")[0] for path in tree(other)} == {"runs"} and not (tmp_path / "first/runs").exists()


@pytest.mark.cold
def test_hy_06_relative_paths_in_a_sweep(tmp_path: Path) -> None:
    """Relative data paths break in the jobs of a sweep."""
    files = images(tmp_path / "data")
    words = ("-m", *PICTURES, "hydra.job.chdir=True", "seed=1,2")
    start(*words, cwd=tmp_path, env={"OPENED": str(tmp_path / "opened")}).ends(0, timeout=120)
    assert opened(tmp_path) == files
    assert {path.split("/")[0] for path in tree(tmp_path)} == {"data", "opened", "runs"}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["r-seed-1", "r-seed-2"]


def test_hy_08_the_same_command_continues_the_same_run(tmp_path: Path) -> None:
    """Auto-resume never finds anything because the rerun has a new time-stamped directory."""
    words = ("+recipe=toy", "callbacks.async_checkpoint.every=5", "trainer.max_steps=30", "~callbacks.mlflow")
    words = (*words, kill_at(17, "forward"), "+recipe.step_seconds=0.02")
    start(*words, cwd=tmp_path).crashed()
    saved = committed_steps(tmp_path / "runs/toy")[0]
    again = start(*words, cwd=tmp_path).ends(0)
    assert saved >= 10 and f"resumed at step {saved}" in again.output()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["toy"]
    assert [event["step"] for event in events(tmp_path / "runs/toy", "restored")] == [saved]


@pytest.mark.parametrize("key", ["run.name", "run.dir"])
def test_hy_08_a_name_with_the_time_in_it_is_warned_about(key: str, tmp_path: Path) -> None:
    """Auto-resume with a time-stamped directory finds nothing: a warning at the start says so."""
    run = start("+recipe=job", f"{key}=at-${{now:%H%M%S}}", "trainer.max_steps=1", cwd=tmp_path).ends(0)
    assert f"WARNING {key} holds the time" in run.stderr()


NAMES = ["2024_01_02", "true", "null", "1e3", "007", "00:30"]


def test_hy_10_names_are_taken_as_typed(tmp_path: Path, with_store: Callable[[Path], Path]) -> None:
    """Run or directory names typed by users are turned into numbers or booleans."""
    root = with_store(tmp_path)
    for words in (("trainer.max_steps=4", MLFLOW), ("trainer.max_steps=8",)):  # the second time each goes on
        for run in [start("+recipe=job", *words, f"run.name={name}", cwd=tmp_path) for name in NAMES]:
            run.ends(0, timeout=120)
    assert sorted(path.name for path in root.iterdir() if (path / "config.yaml").exists()) == sorted(NAMES)
    for name in NAMES:
        assert [event["step"] for event in events(root / name, "restored")] == [4]
    logged = mlflow_runs(root)
    assert {name: len(runs) for name, runs in logged.items()} == dict.fromkeys(NAMES, 1)


BROKEN = {
    "mine.py": "from torch import nn\n\n\ndef model(width: int = 4):\n    return nn.Linear(16, width)\n",
    "syntax.py": "x = 1\ndef model(:\n    pass\n",
    "missing.py": "x = 1\nimport no_such_package_at_all\n",
    "strange.py": (
        "class Strange(Exception):\n    def __init__(self, code, place):\n        super().__init__(f'{code} at {place}')\n"
        "\n\ndef model():\n    raise Strange(17, 'the bridge')\n"
    ),
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("model._target_=mine.modell",), ("model", "mine.modell", "Did you mean 'model'?")),
        (("model._target_=syntax.model",), ("model", "syntax.model", "SyntaxError", "syntax.py:2")),
        (("model._target_=missing.model",), ("model", "ModuleNotFoundError: No module named 'no_such", "missing.py:2")),
        (("model._target_=mine.model", "+model.depth=3"), ("model.depth", "mine.model", "mine.py:4")),
        (("model._target_=strange.model",), ("model", "strange.model", "Strange: 17 at the bridge", "strange.py:7")),
    ],
)
def test_hy_12_an_error_in_a_users_factory_is_shown_as_it_is(
    words: tuple[str, ...], told: tuple[str, ...], tmp_path: Path
) -> None:
    """An error inside a user factory shows as 'error locating target'; the real cause is hidden."""
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    run = start("+recipe=job", "run.name=r", *words, cwd=tmp_path)
    assert run.wait() != [0]
    assert all(text in run.stderr() for text in told), run.stderr()
