"""What `run.init_from` takes, and what it says of what it does not take."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from framework.callback import Callback
from framework.checkpoint import VolumeWriter
from framework.errors import CheckpointError, ConfigError, StateMismatchError
from framework.trainer import Trainer
from tests.loop.runs import core, fit, flat, make


class Begin(Callback):
    """Keeps the weights as they are right before the first step."""

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        self.weights = flat(trainer)


def begun(folder: Path, source: object) -> dict[str, Any]:
    begin = Begin()
    fit(folder, callbacks=core(begin=begin), max_steps=1, run={"init_from": str(source)})
    return {key: value for key, value in begin.weights.items() if key.startswith("model.")}


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=VolumeWriter(folder), no_dist=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Of the model of these runs, changed, by its own names."""
    live = flat(fit(tmp_path_factory.mktemp("other"), max_steps=1))
    return {key.removeprefix("model."): live[key] + 1 for key in live if key.startswith("model.")}


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_weights_that_a_volume_writer_wrote_are_taken(
    tmp_path: Path, weights: dict[str, torch.Tensor], prefix: str
) -> None:
    save({"model": weights, "optim": {"lr": 0.1}}, tmp_path / "plain")
    found = begun(tmp_path / "run", f"{prefix}{tmp_path / 'plain'}")
    assert weights and found.keys() == {f"model.{key}" for key in weights}
    assert all(torch.equal(found[f"model.{key}"], value) for key, value in weights.items())


def test_damaged_weights_of_a_volume_writer_are_refused_by_their_checksums(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save({"model": weights}, tmp_path / "plain")
    (file,) = (tmp_path / "plain").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"run\.init_from=.*{file.name} is damaged"):
        begun(tmp_path / "run", tmp_path / "plain")
    os.truncate(file, 10)
    with pytest.raises(CheckpointError, match=rf"run\.init_from=.*{file.name}"):
        begun(tmp_path / "again", tmp_path / "plain")


def test_a_model_under_another_key_is_refused_with_keys_that_are_there(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save({"app": {"net": weights}}, tmp_path / "plain")
    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint: 0\.weight") as caught:
        begun(tmp_path / "run", tmp_path / "plain")
    assert "Tensors in the checkpoint: app.net.0.bias" in str(caught.value)


def test_the_newest_good_checkpoint_of_a_remote_place_and_of_a_run_is_taken(tmp_path: Path) -> None:
    fit(tmp_path / "source")
    steps = sorted((tmp_path / "source" / "checkpoints").glob("step_*"))
    place = tmp_path / "far" / "wide"
    place.mkdir(parents=True)
    for step in steps:
        shutil.copytree(step, place / step.name)
    expected = begun(tmp_path / "expected", steps[-2])
    newest = begun(tmp_path / "newest", place)
    assert not torch.equal(newest["model.0.weight"], expected["model.0.weight"])
    for folder in (place / steps[-1].name, steps[-1]):
        next(folder.glob("*.distcp")).unlink()
    for name, source in (("remote", place), ("run", tmp_path / "source")):
        found = begun(tmp_path / name, source)
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_what_is_not_read_is_refused_with_how_to_convert_or_copy_it(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"w\.pt is a file.*torch_save_to_dcp\('"):
        make(tmp_path / "one", run={"init_from": str(tmp_path / "w.pt")}).fit()
    with pytest.raises(ConfigError, match=r"is a URL.*framework\.checkpoint copy s3://bucket/run/step_1 FOLDER"):
        make(tmp_path / "two", run={"init_from": "s3://bucket/run/step_1"}).fit()
    with pytest.raises(ConfigError, match=r"init_from=s4://a: .*no volume of kind s4"):
        make(tmp_path / "three", run={"init_from": "s4://a"}).fit()
    (tmp_path / "claimed").mkdir()
    (tmp_path / "claimed" / "claim.json").write_text("{}")
    with pytest.raises(ConfigError, match="there is no checkpoint in that run"):
        make(tmp_path / "four", run={"init_from": str(tmp_path / "claimed")}).fit()
