"""The package as others get it: from a wheel, and from a checkout that can be edited."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import framework
from tests.config.helpers import write

ROOT = Path(framework.__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source, so that building leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("framework", "recipes", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def environment(folder: Path) -> Path:
    """A new environment that borrows the libraries of this one, but not this package; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder).strip())
    borrowed = sysconfig.get_paths()["purelib"]
    # a plain path line: .pth files in there, such as one of an editable install, are not read
    (own / "zz_borrowed.pth").write_text(f"{borrowed}\n")
    return python


def install(python: Path, *what: str | Path, cwd: Path) -> None:
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--ignore-installed",
        *what,
        cwd=cwd,
    )


def check_in_a_folder_of_ones_own(python: Path, folder: Path) -> None:
    folder.mkdir()
    write(folder)
    listed = run(python, "-m", "framework.train", "--help", cwd=folder)
    assert "yours: mine" in listed and "built-in: imagenet_resnet, toy" in listed
    code = (
        "from framework.config import build_recipe, check, compose\n"
        "for name in ('mine', 'toy'):\n"
        "    config = compose([f'+recipe={name}']); check(config)\n"
        "    print(type(build_recipe(config)).__module__, config.run_dir)"
    )
    for init in (False, True):
        if init:
            (folder / "recipes" / "__init__.py").write_text("")
        assert run(python, "-c", code, cwd=folder).splitlines() == ["recipes.mine runs/mine", "recipes.toy runs/toy"]
    assert not (folder / "runs").exists()


@pytest.mark.cold
def test_a_wheel_finds_built_in_and_own_recipes(checkout: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, checkout, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "framework/configs/train.yaml",
        "framework/configs/recipe/toy.yaml",
        "recipes/toy.py",
        "framework/py.typed",
    ):
        assert name in names
    assert "recipes/__init__.py" not in names
    python = environment(tmp_path / "venv")
    install(python, wheel, cwd=tmp_path)
    check_in_a_folder_of_ones_own(python, tmp_path / "work")


@pytest.mark.cold
def test_an_editable_install_finds_built_in_and_own_recipes(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    install(python, "-e", checkout, cwd=tmp_path)
    check_in_a_folder_of_ones_own(python, tmp_path / "work")


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "framework").rglob("__init__.py")}
    configs = {path.parent.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    found |= {".".join(("framework", *path.parts)) for path in configs}
    assert set(listed) == found | {"recipes"}
