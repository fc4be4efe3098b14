"""The Makefile: what it says while it installs, and how it starts MLflow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from framework import train

ROOT = Path(train.__file__).parents[1]
# stands for the interpreter: `-m venv .venv` makes the one that then stands for pip
PYTHON = """\
#!/bin/sh
mkdir -p .venv/bin
printf '#!/bin/sh\\necho "noise of pip $*"\\n%s\\n' "$FATE" > .venv/bin/python
chmod +x .venv/bin/python
"""


def make(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    command = ["make", "--no-print-directory", f"PYTHON={folder / 'python'}", *words]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))} | environment
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(autouse=True)
def needs_make() -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")


def test_an_installation_says_one_line(tmp_path: Path) -> None:
    done = make(tmp_path, "venv", FATE="exit 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "installing into .venv, about two minutes\n", "")
    assert (tmp_path / ".venv" / ".installed").exists()


def test_an_installation_that_fails_shows_everything(tmp_path: Path) -> None:
    done = make(tmp_path, "venv", FATE="exit 3")
    assert done.returncode != 0 and "noise of pip -m pip install" in done.stdout
    assert not (tmp_path / ".venv" / ".installed").exists()


def test_mlflow_is_shown_with_its_address_and_without_its_job_runner(tmp_path: Path) -> None:
    said = make(tmp_path, "-n", "ui", "PORT=5967", "ROOT=mine").stdout
    assert 'echo "http://127.0.0.1:5967' in said and "--port 5967" in said and "--workers 1" in said
    assert "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false" in said and f"sqlite:///{tmp_path}/mine/mlflow.db" in said


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in allowed if one.startswith("torch"))  # type: ignore[union-attr]
    tested = dict(re.findall(r"'(torch(?:vision)?)==([\d.]+)\.0'", (ROOT / "Makefile").read_text()))
    assert tested and tested.items() <= lowest.items()
