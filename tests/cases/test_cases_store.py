"""Training from an object store that goes away in the middle of an epoch, or refuses a third of what is asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from image_tools import AUDIT, audited, job, pictures
from support import events, start
from support.storage import S3

from framework.volume import open_volume

FILES = 64


def words(s3: S3, folder: Path, *more: str) -> tuple[str, ...]:
    """A run of two epochs of 16 steps over images in the store, without a cache."""
    volume = open_volume(s3.url)
    for path in pictures(folder / "data", FILES).rglob("*.png"):
        volume.put(str(path.relative_to(folder / "data")), path.read_bytes())
    same = job("volume", s3.url, "trainer.max_steps=32", AUDIT, "+data.train.cache=false")
    return (*same, *more)


def retries(run: Path) -> int:
    return sum(event["retries"] for event in events(run, "data"))


@pytest.mark.parametrize(
    ("seconds", "workers"),
    [(3, 2), pytest.param(20, 0, marks=pytest.mark.soak), pytest.param(20, 2, marks=pytest.mark.soak)],
)
def test_training_goes_on_when_a_store_comes_back(seconds: int, workers: int, s3: S3, tmp_path: Path) -> None:
    """A store that is away for a while in mid-epoch ends the run, or costs samples."""
    s3.proxy.delay(0.03)
    small = (f"loader.num_workers={workers}", "loader.prefetch_factor=1", "loader.look_ahead=1")
    run = start(*words(s3, tmp_path, *small), cwd=tmp_path)
    run.until(lambda: s3.proxy.requests("GET", "*.png*") >= FILES + 8)
    s3.proxy.stop()
    try:
        asked = s3.proxy.requests("GET", "*.png*")
        time.sleep(seconds)
        assert run.is_alive() and asked < 2 * FILES  # in the second epoch, and not through with it
    finally:
        s3.proxy.start()
    run.ends(0)
    assert retries(tmp_path / "runs/r") > 0
    audited(tmp_path / "runs/r", FILES, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_answers_503_to_a_third_of_requests_loses_nothing(workers: int, s3: S3, tmp_path: Path) -> None:
    """Refused requests become samples that are left out."""
    command = words(s3, tmp_path, f"loader.num_workers={workers}")
    s3.proxy.fail(503, every=3)
    start(*command, cwd=tmp_path).ends(0)
    assert retries(tmp_path / "runs/r") > FILES / 2 and s3.proxy.met > FILES / 2
    audited(tmp_path / "runs/r", FILES, 2)
