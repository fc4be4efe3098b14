"""The README and the Makefile do what they say."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework import train
from framework.config import build_callbacks, check, compose

ROOT = Path(train.__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_recipe_of_the_readme_trains_in_an_empty_folder(folder: Path) -> None:
    module = PYTHON[0]
    (config,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (folder / "recipes" / "mine.py").write_text(module)
    (folder / "configs" / "recipe" / "mine.yaml").write_text(config)
    words = ["+recipe=mine", "model.hidden=128", "run.name=wide", "trainer.max_steps=3", "loader.num_workers=0"]
    assert train.main([*words, "~callbacks.mlflow", "~callbacks.progress"]) == 0
    assert list((folder / "runs" / "wide" / "checkpoints").glob("step_0000000003/.metadata"))


def test_the_python_of_the_readme_trains_and_gives_the_weights(folder: Path) -> None:
    mine, run, plain, weights = PYTHON
    names: dict[str, Any] = {}
    exec(mine, names)
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    recipe = names["Mine"](model=names["model"], optimizer=sgd, train_data=names["samples"])
    exec(run, {"recipe": recipe})
    # alone it works too, with a warning of torch's
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        exec(
            plain.replace("s3://bucket", "bucket").replace("/mnt/", "mnt/"), {"torch": torch, "model": names["model"]()}
        )
    finally:
        dist.destroy_process_group()
    assert (folder / "bucket/run/step_1000/.metadata").exists() and (folder / "mnt/runs/step_2000/.metadata").exists()
    exec(weights)
    assert torch.load("mine.pt")["model"].keys() == names["model"]().state_dict().keys()


def test_the_readme_names_every_callback(folder: Path) -> None:
    table = README[README.index("## Callbacks") :]
    assert [name for name in build_callbacks(compose(["+recipe=toy"])) if f"| `{name}` |" not in table] == []


def make(*words: str) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_lists_its_targets() -> None:
    listed = make()
    for target in ("help", "venv", "train", "test", "lint", "soak", "bench", "ui", "clean"):
        assert re.search(rf"^  make {target}\b +\S", listed, re.MULTILINE)
    assert make("help") == listed


def test_what_make_train_adds_is_a_valid_config(folder: Path) -> None:
    (command,) = make("-n", "train", "-o", ".venv/.installed").splitlines()
    words = shlex.split(command)
    words = words[words.index("framework.train") + 1 :]
    assert "+recipe=imagenet_resnet" in words and "run.name=digits" in words
    check(compose(words))


def test_make_test_is_lint_then_all_but_the_slow_tests() -> None:
    commands = make("-n", "test", "-o", ".venv/.installed", "PYTEST_ARGS=tests/config")
    order = [
        commands.index(text) for text in ("ruff check", "ruff format --check", "mypy", "-m 'not soak' tests/config")
    ]
    assert order == sorted(order) and "OMP_NUM_THREADS=1" in commands
