"""Security: SE-01, SE-04, and what a checkpoint may not reach outside of its folder."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_tools import state_of
from support import checkpoint, committed_steps, events, start

from framework.checkpoint.files import sums_of
from framework.checkpoint.manifest import METADATA, Seal, seal, unseal


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def pickled(trap: Trap) -> bytes:
    return pickle.dumps({"progress": trap, "x": trap})


def torch_saved(trap: Trap) -> bytes:
    buffer = io.BytesIO()
    torch.save({"progress": trap, "x": trap}, buffer)
    return buffer.getvalue()


def poison(folder: Path, which: str, data: bytes) -> None:
    """Puts `data` in place of one file of a checkpoint and makes all sizes and checksums right again."""
    record, old = unseal((folder / METADATA).read_bytes())
    manifest = (folder / old.manifest).read_bytes()
    if which == METADATA:
        record = data
    elif which == "manifest":
        manifest = data
    else:
        values = json.loads(manifest)
        (name,) = [name for name in values["files"] if name.startswith(which)]
        (folder / name).write_bytes(data)
        values["files"][name] = {"size": len(data), "crc32": list(sums_of(data))}
        manifest = json.dumps(values).encode()
    (folder / old.manifest).write_bytes(manifest)
    (folder / METADATA).write_bytes(seal(record, old.manifest, manifest))
    assert unseal((folder / METADATA).read_bytes())[1] == Seal(old.manifest, zlib.crc32(manifest), zlib.crc32(record))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run `r` of two checkpoints."""
    folder = tmp_path_factory.mktemp("source")
    start("+recipe=job", "run.name=r", "trainer.max_steps=10", cwd=folder).ends(0)
    assert committed_steps(folder / "runs/r") == [10, 5]
    return folder


@pytest.mark.parametrize("make", [pickled, torch_saved])
@pytest.mark.parametrize("which", [METADATA, "manifest", "shared", "rank_0", "__0_0"])
def test_se_01_no_file_of_a_checkpoint_runs_code(
    which: str, make: Callable[[Trap], bytes], source: Path, tmp_path: Path
) -> None:
    """Resuming from a checkpoint someone else made runs code hidden in it."""
    shutil.copytree(source / "runs", tmp_path / "runs")
    run = tmp_path / "runs/r"
    marker = tmp_path / "marker"
    data = make(Trap(marker))
    with pickle.loads(data)["x"] if make is pickled else open(marker, "w"):  # the trap works
        assert marker.exists()
    marker.unlink()
    poison(checkpoint(run, 10).path, which, data)

    again = start("+recipe=job", "run.name=r", "trainer.max_steps=12", cwd=tmp_path)
    (code,) = again.wait()
    assert not marker.exists()
    assert "step_0000000010" in again.output()
    if code == 0:
        assert "resumed at step 5" in again.output() and committed_steps(run)[0] == 12
    else:
        assert code == 1 and committed_steps(run)[0] == 10


def test_se_01_weights_of_a_poisoned_checkpoint_are_not_taken(source: Path, tmp_path: Path) -> None:
    """Resuming from a checkpoint someone else made runs code hidden in it: beginning from its weights."""
    shutil.copytree(source / "runs", tmp_path / "runs")
    marker = tmp_path / "marker"
    folder = checkpoint(tmp_path / "runs/r", 10).path
    poison(folder, METADATA, pickled(Trap(marker)))
    new = start("+recipe=job", "run.name=n", f"run.init_from={folder}", "trainer.max_steps=2", cwd=tmp_path).ends(1)
    assert not marker.exists() and str(folder) in new.output()
    assert not (tmp_path / "runs/n/checkpoints").exists() or not committed_steps(tmp_path / "runs/n")


def other_config(folder: Path, config: Any) -> None:
    """Exchanges the config that a checkpoint holds."""
    (file,) = folder.glob("shared.*.pt")
    values = torch.load(file, weights_only=True)
    buffer = io.BytesIO()
    torch.save({**values, "config": config(values["config"])}, buffer)
    poison(folder, "shared", buffer.getvalue())


@pytest.mark.parametrize("target", ["os.system", "logging.os.system"])
def test_se_04_the_config_in_a_checkpoint_is_compared_and_never_built(
    target: str, source: Path, tmp_path: Path
) -> None:
    """A config stored in a checkpoint is instantiated on load; a changed _target_ runs any callable."""
    shutil.copytree(source / "runs", tmp_path / "runs")
    run, marker = tmp_path / "runs/r", tmp_path / "marker"
    trap = {"_target_": target, "command": f"touch {marker}"}
    groups = ("recipe", "model", "optimizer", "schedule")
    other_config(checkpoint(run, 10).path, lambda config: {**config, **dict.fromkeys(groups, trap)})

    start("+recipe=job", "run.name=r", "trainer.max_steps=12", cwd=tmp_path).ends(0)
    assert not marker.exists() and committed_steps(run)[0] == 12
    (restored,) = events(run, "restored")
    assert restored["step"] == 10
    assert f"model._target_ is now 'job.mlp', was '{target}'" in restored["notes"]
    assert f"optimizer.command is no longer set, was 'touch {marker}'" in restored["notes"]


def test_se_04_the_config_beside_the_checkpoints_is_compared_and_never_built(source: Path, tmp_path: Path) -> None:
    """A config stored in a checkpoint is instantiated on load: the one of the run directory."""
    shutil.copytree(source / "runs", tmp_path / "runs")
    run, marker = tmp_path / "runs/r", tmp_path / "marker"
    (run / "config.yaml").write_text(
        f"model: {{_target_: os.system, command: 'touch {marker}'}}\n"
        f"recipe: !!python/object/apply:os.system ['touch {marker}']\n"
    )
    start("+recipe=job", "run.name=r", "trainer.max_steps=12", cwd=tmp_path).ends(0)
    assert not marker.exists() and committed_steps(run)[0] == 12


@pytest.mark.parametrize("name", ["../../../secret", "/etc/hostname"])
def test_a_manifest_that_points_elsewhere_is_not_followed(name: str, source: Path, tmp_path: Path) -> None:
    """A manifest names files outside of its folder."""
    shutil.copytree(source / "runs", tmp_path / "runs")
    run = tmp_path / "runs/r"
    (run.parent / "secret").write_bytes(b"secret")
    folder = checkpoint(run, 10).path
    (file,) = folder.glob("manifest.*.json")
    values = json.loads(file.read_text())
    values["files"][name] = values["files"].pop(values["shared_file"])
    values["shared_file"] = name
    poison(folder, "manifest", json.dumps(values).encode())
    again = start("+recipe=job", "run.name=r", "trainer.max_steps=12", cwd=tmp_path).ends(0)
    assert "outside of its folder" in again.output() and "resumed at step 5" in again.output()
    assert (run.parent / "secret").read_bytes() == b"secret"


def test_links_in_what_is_deleted_are_not_followed(source: Path, tmp_path: Path) -> None:
    """Retention follows a link out of the run and deletes what it finds there."""
    shutil.copytree(source / "runs", tmp_path / "runs")
    run, outside = tmp_path / "runs/r", tmp_path / "outside"
    outside.mkdir()
    (outside / "weights.pt").write_bytes(b"precious")
    (outside / ".metadata").write_bytes(b"precious")
    before = state_of(outside)
    (checkpoint(run, 5).path / "folder").symlink_to(outside)
    (checkpoint(run, 5).path / "file").symlink_to(outside / "weights.pt")
    (run / "checkpoints" / "step_0000000003").symlink_to(outside)
    (run / "checkpoints" / "damaged").mkdir(exist_ok=True)
    (run / "checkpoints" / "damaged" / "step_0000000002").symlink_to(outside)
    words = ("+recipe=job", "run.name=r", "trainer.max_steps=20", "callbacks.async_checkpoint.keep=1")
    start(*words, cwd=tmp_path).ends(0)
    assert committed_steps(run)[0] == 20 and not (run / "checkpoints" / "step_0000000005").exists()
    assert state_of(outside) == before
