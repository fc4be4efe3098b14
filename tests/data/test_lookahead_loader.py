"""A loader over a volume that fails, with worker processes: every sample comes once, whole, whatever the volume does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from lookahead_support import content, fill, name_of
from support.faultfs import FaultFS
from support.storage import S3

from framework.data import DataLoader
from framework.data.files import VolumeDataset
from framework.errors import DataError

COUNT = 96


def loader(place: Path | str, cache: Path | None = None, workers: int = 2, **options: object) -> DataLoader:
    kept = {"root": str(cache), "limit": "100%", "min_free": 0} if cache is not None else False
    dataset = VolumeDataset(place, decode=None, label=None, cache=kept)
    return DataLoader(dataset, batch_size=8, shuffle=True, seed=3, num_workers=workers, collate_fn=list, **options)


def fill_bucket(s3: S3) -> None:
    for index in range(COUNT):
        s3.server.ask("PUT", f"/{s3.bucket}/prefix/{name_of(index)}", content(index))


def check_epoch(samples: list[bytes]) -> None:
    assert sorted(samples) == sorted(content(index) for index in range(COUNT))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_refuses_a_third_of_the_requests_loses_nothing(s3: S3, tmp_path: Path, workers: int) -> None:
    fill_bucket(s3)
    made = loader(s3.url, tmp_path / "cache", workers)
    s3.proxy.fail(503, every=3)
    for epoch in range(2):
        check_epoch([sample for batch in made for sample in batch])
        stats = made.take_stats()
        assert (stats.cache_misses, stats.cache_hits) == ((COUNT, 0) if epoch == 0 else (0, COUNT))
        assert (stats.retries > 0) == (epoch == 0)
    made.close()


def read_through_an_outage(s3: S3, seconds: float) -> None:
    fill_bucket(s3)
    made = loader(s3.url)
    samples: list[bytes] = []
    back = threading.Timer(seconds, s3.proxy.start)
    for number, batch in enumerate(made):
        samples += batch
        if number == 2:
            s3.proxy.stop()
            back.start()
    back.join()
    check_epoch(samples)
    check_epoch([sample for batch in made for sample in batch])
    made.close()


def test_a_store_that_is_stopped_in_mid_epoch_is_waited_for(s3: S3) -> None:
    read_through_an_outage(s3, 1.0)


@pytest.mark.soak
def test_a_store_that_is_stopped_for_20_seconds_in_mid_epoch_is_waited_for(s3: S3) -> None:
    read_through_an_outage(s3, 20.0)


def test_a_mount_that_fails_now_and_then_loses_nothing(faultfs: FaultFS, tmp_path: Path) -> None:
    fill(faultfs.backing, COUNT)
    made = loader(faultfs.path, tmp_path / "cache")
    faultfs.fail("read", match="*[05].bin", count=20)
    for index in range(3, COUNT, 10):  # a file that is short three times in a row was cut off
        faultfs.cut(100, match=f"*{Path(name_of(index)).name}", count=2)
    check_epoch([sample for batch in made for sample in batch])
    assert made.take_stats().retries > 0
    faultfs.vanish()
    check_epoch([sample for batch in made for sample in batch])
    made.close()


def test_a_file_that_was_cut_is_named_by_the_loader_or_passed_over(faultfs: FaultFS) -> None:
    fill(faultfs.backing, COUNT)
    made, lenient = loader(faultfs.path), loader(faultfs.path, on_error="substitute")
    (faultfs.backing / name_of(5)).write_bytes(b"cut")
    with pytest.raises(DataError, match=f"{name_of(5)} could not be read \\(3 attempts"):
        list(made)
    samples = [sample for batch in lenient for sample in batch]
    assert len(samples) == COUNT and set(samples) < {content(index) for index in range(COUNT)}
    assert lenient.take_stats().skipped == 1
    made.close()
    lenient.close()


def test_the_loader_goes_elsewhere_and_nothing_of_before_is_in_the_way(faultfs: FaultFS) -> None:
    fill(faultfs.backing, COUNT)
    made = loader(faultfs.path)
    whole = list(made)
    for start in (5, 2, 9):
        made.seek(start * 8)
        assert list(made)[: len(whole) - start] == whole[start:]
    made.close()
