"""python -m framework.config diff."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from framework.config import compose, differences, load, resolved
from framework.config.__main__ import main


def saved(folder: Path, name: str, *words: str) -> Path:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    values = resolved(compose(["+recipe=mine", f"run.name={name}", *words]))
    (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return run


def test_differing_keys_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = saved(folder, "007", "optimizer.lr=1e-5")
    second = saved(folder, "1e3", "optimizer.lr=0.2", "~optimizer.nesterov", "data.root=x")
    assert main(["diff", str(first), str(second / "config.yaml")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "data.root: None -> 'x'",
        "data.train.root: None -> 'x'",
        "optimizer.lr: 1e-05 -> 0.2",
        "optimizer.nesterov: True -> '(absent)'",
        "run.dir: 'runs/007' -> 'runs/1e3'",
        "run.name: '007' -> '1e3'",
    ]


def test_the_same_run_has_no_differences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = saved(folder, "a")
    assert main(["diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out == "no differences\n"


def test_a_saved_config_is_read_as_it_was(folder: Path) -> None:
    run = saved(folder, "1e3", "optimizer.lr=1e-5")
    config = load(run)
    assert config.values == compose(["+recipe=mine", "run.name=1e3", "optimizer.lr=1e-5"]).values
    assert type(config.values["optimizer"]["lr"]) is float


@pytest.mark.parametrize("text", [None, "a: [", "- 1"])
def test_what_is_no_config_is_named(folder: Path, capsys: pytest.CaptureFixture[str], text: str | None) -> None:
    if text is not None:
        (folder / "bad.yaml").write_text(text)
    assert main(["diff", "bad.yaml", "bad.yaml"]) == 1
    assert "bad.yaml" in capsys.readouterr().err


def test_a_value_of_another_type_is_a_difference() -> None:
    assert differences({"a": {"b": 1}}, {"a": {"b": True}}) == {"a.b": (1, True)}
