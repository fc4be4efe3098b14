"""Both shapes of a stream of paths that the README shows, through kills and other numbers of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from case_tools import part
from image_tools import AUDIT, audited, pictures, readme_module
from support import kill_at, killed, start
from support.storage import S3

from framework.data import VolumeDataset
from framework.volume import open_volume

FILES = 48
SHAPES = {"wrapped": ("Photos", "Classify"), "straight": ("paths", "ClassifyPaths")}


def words(shape: str, source: str, cache: str) -> tuple[str, ...]:
    """The command line for a shape: 6 steps an epoch, three epochs."""
    data, recipe = SHAPES[shape]
    return (
        "+recipe=job", f"recipe._target_=recipes.photos.{recipe}", "model={_target_: recipes.photos.model, size: 8}",
        f"data.train={{_target_: recipes.photos.{data}, source: '{source}', cache: {cache}}}", "~data.eval",
        "~data.train.samples", "~callbacks.ids", "trainer.global_batch_size=8", "trainer.max_steps=18", "trainer.eval_every=null",
        "callbacks.async_checkpoint.every=2", AUDIT, part("Synchronous"), "run.name=r",
    )  # fmt: skip


def trains_through_kills(shape: str, source: str, folder: Path, ranks: tuple[int, ...], cold: bool = False) -> None:
    """A kill -9 in the middle of an epoch, and another number of ranks after each; then the audit is clean."""
    readme_module(folder)
    same = words(shape, source, "{root: cache, limit: 4000}")  # bytes: most files are not taken
    kills = [kill_at(4 + 5 * number, "forward", name=f"kill{number}") for number in range(len(ranks) - 1)]
    for number, world in enumerate(ranks):
        command = (*same, *kills, f"loader.num_workers={2 * (number % 2)}")
        run = start(*command, cwd=folder, ranks=world, cold=cold)
        if number == len(ranks) - 1:
            run.ends(0)
        elif cold and world > 1:  # the launcher ends with 1 when one of its processes is killed
            assert run.wait() == [1]
        else:
            killed(run)
    result = audited(folder / "runs/r", FILES, 3)
    assert result.attempts == len(ranks) and result.steps == 18


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_trains_through_kills_on_one_and_two_ranks(shape: str, tmp_path: Path) -> None:
    """Each file once per epoch, from a folder of the local disk through a cache that takes few of them."""
    trains_through_kills(shape, str(pictures(tmp_path / "data", FILES)), tmp_path, (1, 2, 1))


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (4, 4), (2, 4, 1)])
def test_a_shape_trains_through_kills_with_torchrun_from_a_store(
    shape: str, ranks: tuple[int, ...], tmp_path: Path, s3: S3
) -> None:
    """The same from an object store, with the real launcher."""
    for path in pictures(tmp_path / "data", FILES).rglob("*.png"):
        open_volume(s3.url).put(str(path.relative_to(tmp_path / "data")), path.read_bytes())
    trains_through_kills(shape, s3.url, tmp_path, ranks, cold=True)


def listed(root: Path) -> dict[str, Any]:
    """What `cache ls --json` says about the one dataset in a cache."""
    command = [sys.executable, "-m", "framework.data", "cache", "ls", "--json", "--root", str(root)]
    (row,) = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)["datasets"]
    assert isinstance(row, dict)
    return row


@pytest.mark.parametrize("limit", ["1GB", "2kB"])
def test_the_cache_stays_bounded_with_the_workers_of_torchs_own_loader(limit: str, tmp_path: Path) -> None:
    """Which are started anew in each epoch: a file that is not taken must not stay behind five times."""
    size = sum(path.stat().st_size for path in pictures(tmp_path / "data", FILES).rglob("*.png"))
    cache = {"root": tmp_path / "cache", "limit": limit, "min_free": 0}
    files = VolumeDataset(tmp_path / "data", decode=None, label=None, cache=cache)
    loader = torch.utils.data.DataLoader(files.paths(), batch_size=8, num_workers=2)
    rows = []
    for _ in range(5):
        names = sorted(Path(path).name for batch in loader for path in batch if Path(path).stat().st_size)
        assert names == [f"{number:03d}.png" for number in range(FILES)]
        rows.append(listed(tmp_path / "cache"))
    if limit == "1GB":
        assert [(row["files"], row["bytes"]) for row in rows] == [(FILES, size)] * 5
    else:
        assert all(0 < row["files"] < FILES and row["bytes"] <= 2000 for row in rows)
        assert len({row["files"] for row in rows}) == 1  # those that were taken first stay
    assert all(row["transit_bytes"] <= size - row["bytes"] for row in rows)  # of one epoch, and not of five
