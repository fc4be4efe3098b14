"""Security: SE-01."""

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
from support import checkpoint, committed_steps, start

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
