"""The README and the Makefile do what they say."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from framework import train
from framework.config import build_callbacks, build_recipe, check, compose
from framework.data import Mix, ShardStream, VolumeDataset
from framework.data.audit.check import audit
from framework.data.cache import open_cache

ROOT = Path(train.__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


def test_the_recipe_of_the_readme_trains_in_an_empty_folder(folder: Path) -> None:
    module = PYTHON[0]
    (folder / "recipes" / "mine.py").write_text(module)
    (folder / "configs" / "recipe" / "mine.yaml").write_text(YAML[0])
    words = ["+recipe=mine", "model.hidden=128", "run.name=wide", "trainer.max_steps=3", "loader.num_workers=0"]
    assert train.main([*words, "~callbacks.mlflow", "~callbacks.progress"]) == 0
    assert list((folder / "runs" / "wide" / "checkpoints").glob("step_0000000003/.metadata"))


def test_the_python_of_the_readme_trains_and_gives_the_weights(folder: Path) -> None:
    mine, run, _, _, plain, weights = PYTHON
    names: dict[str, Any] = {}
    exec(mine, names)
    exec(run.replace("from recipes.mine import Mine, model, samples\n", ""), dict(names))
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


def images(root: Path, classes: tuple[str, ...] = ("0", "1"), count: int = 6, size: int = 32) -> Path:
    """Writes `root/<class>/<number>.jpg`."""
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (size, size), (40 * number, 0, 0)).save(root / name / f"{number}.jpg")
    return root


def test_the_loader_of_the_readme_gives_an_epoch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = images(folder / "photos", ("cat", "dog"), size=240)
    exec(PYTHON[2].replace("/mnt/photos/train", str(root)), {})
    printed = capsys.readouterr().out
    assert "torch.Size([12, 3, 224, 224])" in printed and printed.count("'cat'") == printed.count("'dog'") == 6
    assert "data/fetch_seconds" in printed


@pytest.mark.parametrize(("data", "recipe"), [("Photos", "Classify"), ("paths", "ClassifyPaths")])
def test_both_shapes_of_a_stream_of_paths_in_the_readme_train(data: str, recipe: str, folder: Path) -> None:
    root = images(folder / "photos")
    (folder / "recipes" / "photos.py").write_text(PYTHON[3])
    (folder / "configs" / "recipe" / "photos.yaml").write_text(
        "# @package _global_\n"
        f"recipe: {{_target_: recipes.photos.{recipe}}}\n"
        "model: {_target_: recipes.photos.model}\n"
        "optimizer: {_target_: torch.optim.SGD, lr: 0.01}\n"
        f"data: {{train: {{_target_: recipes.photos.{data}, source: {root}}}}}\n"
        "trainer: {max_epochs: 1, global_batch_size: 4}\n"
    )
    words = ["+recipe=photos", "run.name=r", "loader.num_workers=0", "~callbacks.mlflow", "~callbacks.progress"]
    assert train.main([*words, "callbacks.data_position.audit=true"]) == 0
    result = audit(folder / "runs" / "r" / "events")
    assert result.is_clean and [each.trained for each in result.epochs] == [12]


@pytest.mark.parametrize(("number", "kind", "samples"), [(1, VolumeDataset, 12), (2, Mix, 24), (3, ShardStream, 5)])
def test_the_data_configs_of_the_readme_build(number: int, kind: type, samples: int, folder: Path) -> None:
    images(folder / "photos"), images(folder / "scans")
    with tarfile.open(folder / "shard.tar", "w") as shard:
        for name in range(5):
            for ending, data in (("png", b"png"), ("cls", b"1")):
                part = tarfile.TarInfo(f"{name}.{ending}")
                part.size = len(data)
                shard.addfile(part, io.BytesIO(data))
    text = YAML[number].replace("/mnt/scans", str(folder / "scans")).replace("s3://bucket/shards", str(folder))
    text = text.replace("s3://bucket/photos", str(folder / "photos")).replace(
        "s3://bucket/train", str(folder / "photos")
    )
    (folder / "configs" / "recipe" / "mine.yaml").write_text(YAML[0].partition("data:")[0] + text)
    (folder / "recipes" / "mine.py").write_text(PYTHON[0])
    data = build_recipe(compose(["+recipe=mine", "trainer.max_steps=1"])).build_train_data()
    assert isinstance(data, kind) and len(data) == samples


def test_the_cache_of_the_readme_is_one(folder: Path) -> None:
    from yaml import safe_load

    options = safe_load(YAML[4].replace("/local_disk0", str(folder)))["cache"]
    assert open_cache(options).limit.of(10**12) == 200 * 10**9  # type: ignore[union-attr]


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
