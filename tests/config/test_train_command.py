"""The command itself: its options, its words, its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from framework import train
from framework.config import compose
from tests.config.helpers import RECIPE, tree, write

ROOT = Path(train.__file__).parents[1]
FAST = ["trainer.max_steps=3", "~callbacks.mlflow", "~callbacks.progress"]


def test_help_lists_recipes_and_needs_nothing_heavy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "yours: mine" in text and "built-in: imagenet_resnet, toy" in text
    assert "usage: python -m framework.train +recipe=NAME" in text


@pytest.mark.cold
def test_help_imports_neither_torch_nor_hydra(folder: Path) -> None:
    code = "import sys; from framework.train import main; main(['--help']); print([m for m in ('torch', 'hydra', 'omegaconf') if m in sys.modules])"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_cfg_prints_the_resolved_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+recipe=mine", "data.root=/somewhere", "run.name=1e3"]
    assert train.main([*words, "--cfg"]) == 0
    printed = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert printed == compose(words).values
    assert tree(folder) == tree(folder) and not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "No recipe was chosen"),
        (["recipe=mine"], "+recipe=mine"),
        (["+recipe=mine", "--validte"], "Did you mean '--validate'?"),
        (["+recipe=mine", "--max_steps=5"], "'key=value' to the config"),
        (["+recipe=mine", "--cfg", "--explain"], "exclude each other"),
        (["+recipe=mine", "+model.lrr=1", "--validate"], "model.lrr"),
        (["+recipe=mine", "optimizer.lr=0.1,0.2"], "add -m"),
    ],
)
def test_bad_input_is_one_block_and_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    before = tree(folder)
    assert train.main(words) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and part in said.err and "Traceback" not in said.err
    assert said.out == "" and tree(folder) == before


def test_other_ranks_say_one_line_with_their_rank(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("logging.captureWarnings", lambda on: None)  # this process is no rank
    assert train.main(["+recipe=nothing"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == ["[rank 3] error: There is no recipe 'nothing'. Recipes found:"]
    assert train.main(["+recipe=mine", "--cfg"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.cold
def test_only_rank_0_speaks_and_others_warn_with_their_rank(folder: Path) -> None:
    code = (
        "import logging, warnings; from framework import train; train._configure_logging()\n"
        "log = logging.getLogger('framework.x'); log.info('details'); log.warning('careful'); warnings.warn('old')"
    )
    said = {}
    for rank in ("0", "2"):
        env = os.environ | {"PYTHONPATH": str(ROOT), "RANK": rank}
        said[rank] = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
        )
    assert "details" in said["0"].stderr
    lines = [line for line in said["2"].stderr.splitlines() if line and not line.startswith(" ")]
    assert lines and all(line.startswith("[rank 2] WARNING") for line in lines)
    assert "details" not in said["2"].stderr


def test_ctrl_c_before_the_loop_is_130_without_a_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = "        self.smoothing = smoothing\n\n    def train_step(self, model, batch):\n        return None\n"
    recipe = RECIPE.replace("        self.smoothing = smoothing\n", step)
    write(folder, recipe.replace("    return nn.Linear(depth, width)", "    raise KeyboardInterrupt"))
    assert train.main(["+recipe=mine", "--validate"]) == 130
    said = capsys.readouterr()
    assert "Traceback" not in said.err and not (folder / "runs").exists()


SENDS = """
import os, signal
from framework import Callback
if signal.getsignal(signal.{name}) is signal.SIG_DFL:
    raise RuntimeError("{name} would end the process at once")
{code}
class Own(Callback): ...
"""
KILL = "os.kill(os.getpid(), signal.{name})"
SWALLOWED = f"try:\n    {KILL}\nexcept BaseException:\n    pass"


def test_a_signal_that_a_librarys_way_out_stumbles_over_is_still_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in hydra, which closes a file in `finally` that it had not opened yet."""

    def stumble(words: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            file = (folder / "file").open("w")
        finally:
            file.close()

    monkeypatch.setattr("framework.config.compose", stumble)
    assert train.main(["+recipe=mine"]) == 143
    assert capsys.readouterr().err == "interrupted by SIGTERM before the first step\n"


@pytest.mark.parametrize("code", [KILL, SWALLOWED], ids=["raised", "swallowed"])
@pytest.mark.parametrize(("name", "exit_code"), [("SIGUSR1", 75), ("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_during_an_import_ends_with_its_code_and_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, exit_code: int, code: str
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    (folder / "own_callbacks.py").write_text(SENDS.format(name=name, code=code.format(name=name)))
    assert train.main(["+recipe=toy", *FAST, "+callbacks.mine._target_=own_callbacks.Own"]) == exit_code
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted by {name} before the first step"
    assert not (folder / "runs").exists()
    assert {number: signal.getsignal(number) for number in before} == before


def test_ctrl_c_that_a_shell_lets_a_run_in_the_background_ignore_ends_its_start_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own_callbacks.py").write_text(SENDS.format(name="SIGINT", code=KILL.format(name="SIGINT")))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert train.main(["+recipe=toy", *FAST, "+callbacks.mine._target_=own_callbacks.Own"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted by SIGINT before the first step"
    assert not (folder / "runs").exists()


def test_without_the_preemption_callback_sigterm_is_left_as_it_was(folder: Path) -> None:
    looks = "import signal\nfrom framework import Callback\nclass Own(Callback):\n    def setup(self, trainer):\n        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    (folder / "own_callbacks.py").write_text(looks)
    words = ["+recipe=toy", *FAST, "+callbacks.mine._target_=own_callbacks.Own", "~callbacks.preemption"]
    assert train.main(words) == 0


@pytest.mark.parametrize("words", [["--help"], ["+recipe=toy", "--cfg"], ["+recipe=toy", "--explain"]])
def test_a_reader_that_has_read_enough_is_no_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert train.main(words) == 0
        monkeypatch.undo()
    assert "BrokenPipe" not in capsys.readouterr().err


def test_an_unexpected_error_is_shown_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = "    def train_step(self, model, batch):\n        raise LookupError('in the step')\n"
    write(
        folder,
        RECIPE.replace("def net", "").replace(
            "(depth: int, width: int = 4):\n    return nn.Linear(depth, width)\n", training
        ),
    )
    from tests.config.helpers import CONFIG

    toy = CONFIG.replace("recipes.mine.net, depth: 3", "recipes.toy.mlp").replace(
        '{_target_: recipes.mine.Data, root: "${data.root}", transform: {_target_: recipes.mine.transform}}',
        "{_target_: recipes.toy.Samples}",
    )
    write(
        folder,
        RECIPE.replace("        self.smoothing = smoothing\n", f"        self.smoothing = smoothing\n\n{training}"),
        toy,
    )
    assert train.main(["+recipe=mine", "loader.num_workers=0", *FAST]) == 1
    said = capsys.readouterr()
    assert "Traceback" in said.err and "LookupError: in the step" in said.err


def test_a_small_run_trains_explains_and_validates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+recipe=toy", *FAST, "run.name=007"]
    before = tree(folder)
    assert train.main([*words, "--validate"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "valid"
    assert train.main([*words, "--explain"]) == 0
    assert "step_end" in capsys.readouterr().out
    assert tree(folder) == before
    assert train.main(words) == 0
    saved: Any = OmegaConf.load(folder / "runs" / "007" / "config.yaml")
    assert saved.trainer.max_steps == 3 and type(saved.optimizer.lr) is float
    assert Path.cwd() == folder
    assert {path.split("/")[0] for path in tree(folder)} == {"recipes", "configs", "runs"}
