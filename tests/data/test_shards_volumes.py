"""Shards on volumes: counted once, fetched ahead, cached where they fit, and refused when they have changed."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shard_sets import numbered, share, stream, write, write_tar
from support.faultfs import FaultFS
from support.storage import S3

from framework.data import ShardStream
from framework.data.streams.loader import StreamLoader
from framework.errors import ConfigError, DataError, StateMismatchError

COUNTS = [7, 12, 5]


@pytest.fixture
def bucket(s3: S3, tmp_path: Path) -> Iterator[S3]:
    """A bucket with shards of `COUNTS` samples of 100 kB each."""
    for path in sorted(write(tmp_path / "made", "tar", COUNTS, 100_000).iterdir()):
        s3.server.ask("PUT", f"/{s3.bucket}/prefix/{path.name}", path.read_bytes())
    yield s3


def all_of(made: ShardStream) -> list[Any]:
    return [sample for _, sample in share(made)]


def test_shards_of_a_bucket_are_counted_by_ranges_and_read_from_the_cache(bucket: S3, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": {"root": tmp_path / "cache", "min_free": 0}, "buffer": 3}
    made = stream(bucket.url, "tar", **options)  # type: ignore[arg-type]
    try:
        assert made.counts.tolist() == COUNTS
        requests = bucket.proxy.requests("GET", "*.tar")
        assert requests >= 3
        assert stream(bucket.url, "tar", **options).counts.tolist() == COUNTS
        assert bucket.proxy.requests("GET", "*.tar") == requests  # not counted again
        assert sorted(all_of(made)) == list(range(24))
        stats = made.take_stats()
        assert stats.cache_misses == 3 and stats.bytes_fetched > made.manifest.total_bytes
        requests = bucket.proxy.requests("GET", "*.tar")
        again = stream(bucket.url, "tar", **options)  # type: ignore[arg-type]
        assert again.counts.tolist() == COUNTS
        assert all_of(again) == all_of(made)
        assert bucket.proxy.requests("GET", "*.tar") == requests  # not read again
        again._files.close()
    finally:
        made._files.close()


@pytest.mark.parametrize("is_cached", [True, False])
def test_workers_read_a_bucket_of_which_the_main_process_counted_the_shards(
    is_cached: bool, bucket: S3, tmp_path: Path
) -> None:
    cache: Any = {"root": tmp_path / "cache", "min_free": 0} if is_cached else False
    made = stream(bucket.url, "tar", cache=cache, buffer=3)  # type: ignore[arg-type]
    one = StreamLoader(made, 4, strategy="shards", samples=24, num_workers=2, timeout=60)
    try:
        assert sorted(number for _ in range(6) for number in next(iter(one)).tolist()) == list(range(24))
        one.commit(6)
        assert one.take_stats().cache_misses == 4 - is_cached  # the second shard is read by both
    finally:
        one.close()
        made._files.close()


def test_shards_that_are_too_large_to_be_held_are_read_by_ranges(
    bucket: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stream(bucket.url, "tar", cache=False, samples=COUNTS, buffer=3)  # type: ignore[arg-type]
    monkeypatch.setattr(made._files, "_budget_bytes", 100)
    assert sorted(all_of(made)) == list(range(24))
    stats = made.take_stats()
    assert stats.cache_misses == 0 and stats.bytes_fetched >= made.manifest.total_bytes
    # the last samples alone: what lies before them in their shard is passed over by its headers
    before = stats.bytes_fetched
    assert len(share(made, taken=22)) == 2
    assert made.take_stats().bytes_fetched < before / 2
    made._files.close()


def test_the_next_shard_is_fetched_while_one_is_read(faultfs: FaultFS, tmp_path: Path) -> None:
    write(faultfs.backing, "tar", [6] * 4, 1000)
    made = stream(
        faultfs.path,
        "tar",
        cache={"root": tmp_path / "cache", "min_free": 0},
        buffer=1,
        shuffle_shards=False,
        samples=6,
    )
    opened = lambda: {name for what, name in faultfs.calls("open") if name.endswith(".tar")}  # noqa: E731
    given = made.begin(0, seed=0, done=None, shares=[9, 15], consumer=0, taken=0)
    assert next(given)[1] == 0
    deadline = time.monotonic() + 60
    while len(opened()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(Path(name).name for name in opened()) == ["s000.tar", "s001.tar"]
    assert [sample for _, sample in given] == list(range(1, 9))
    assert len(opened()) == 2  # none that belongs to another reader
    made._files.close()


def test_a_mount_that_fails_now_and_then_gives_every_sample(faultfs: FaultFS, tmp_path: Path) -> None:
    write(faultfs.backing, "text", [50, 60])
    made = stream(faultfs.path, "text", cache=False)
    faultfs.fail("read", count=2)
    assert sorted(all_of(made)) == list(range(110))
    assert made.take_stats().retries >= 2
    made._files.close()


def test_counting_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from framework.data.shards import index

    monkeypatch.setattr(index, "SIGN_SECONDS", 0.0)
    write(tmp_path, "text", [5, 6])
    with caplog.at_level(logging.INFO):
        assert len(stream(tmp_path, "text")) == 11
    assert any("counting the samples of" in line and "of 2 shards so far" in line for line in caplog.messages)


def test_given_counts_are_believed_and_found_out(tmp_path: Path) -> None:
    for kind in ("tar", "text", "parquet"):
        folder = write(tmp_path / kind, kind, [4, 6])
        names = sorted(path.name for path in folder.iterdir())
        assert stream(folder, kind, samples=dict(zip(names, [4, 6], strict=True))).counts.tolist() == [4, 6]
        with pytest.raises(DataError, match=r"s001\.\w+ has more than the 4 samples that samples=… says"):
            share(stream(folder, kind, samples=4, shuffle_shards=False))
        given = [sample for _, sample in share(stream(folder, kind, samples=6, shuffle_shards=False, buffer=1))]
        assert given[:4] + given[6:] == [*range(10)], kind
        assert all("was expected" in str(sample) for sample in given[4:6]), given
    with pytest.raises(ConfigError, match=r"has 1 names for 2 shards of .*: 's000\.parquet' has none"):
        stream(folder, "parquet", samples={"s00.parquet": 3})
    with pytest.raises(ConfigError, match=r"samples=\[4\] must be a number .* for each of the 2 shards"):
        stream(folder, "parquet", samples=[4])


def test_changed_shards_are_refused_with_what_changed(tmp_path: Path) -> None:
    write(tmp_path, "tar", [4, 6])
    before = stream(tmp_path, "tar")
    saved = before.data_state()
    stream(tmp_path, "tar").check_data_state(saved)
    with pytest.raises(StateMismatchError, match=r"shuffle_shards=true, buffer=5 now, .*buffer=1000 then"):
        stream(tmp_path, "tar", buffer=5).check_data_state(saved)
    write_tar(tmp_path / "s001.tar", numbered(4, 7))
    write_tar(tmp_path / "s002.tar", numbered(11, 1))
    (tmp_path / "s000.tar").unlink()
    with pytest.raises(StateMismatchError) as caught:
        stream(tmp_path, "tar").check_data_state(saved)
    assert "2 shards of 8 samples now, 2 of 10 then" in str(caught.value)
    assert "1 added ('s002.tar'), 1 removed ('s000.tar')" in str(caught.value)


def test_a_place_in_other_shards_is_refused(tmp_path: Path) -> None:
    made = stream(write(tmp_path, "text", [10]), "text", buffer=4)
    done = made.merge(0, seed=0, done=None, shares=[10], taken=[3])
    with pytest.raises(DataError, match=r"3 of 10 samples are done, and 8 are to come"):
        share(made, done=done, shares=[8])
    with pytest.raises(DataError, match=r"buffer=4 then, .*buffer=5 now"):
        share(stream(tmp_path, "text", buffer=5), done=done, shares=[7])
    with pytest.raises(DataError, match="does not fit it"):
        share(made, done=done | {"intervals": [[0, 4], [2, 3]]}, shares=[5])


@pytest.mark.parametrize("workers", [0, 1])
def test_on_error_decides_what_damaged_samples_do(workers: int, tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [16])
    lines = (tmp_path / "s000.jsonl").read_text().splitlines()
    lines[5] = "{"
    (tmp_path / "s000.jsonl").write_text("\n".join(lines))
    made = stream(tmp_path, "jsonl", buffer=1)

    def loaded(on_error: str) -> list[int]:
        one = StreamLoader(made, 4, strategy="shards", samples=16, num_workers=workers, on_error=on_error, timeout=60)
        try:
            batches = iter(one)
            ids = [number for _ in range(4) for number in next(batches).tolist()]
            receipts = one.commit(4)
            assert one.take_stats().skipped + sum(each.stats.skipped for each in receipts) == 1
            return ids
        finally:
            one.close()

    assert loaded("skip") == [0, 1, 2, 3, 4, 6, 6, 7, *range(8, 16)]
    with pytest.raises(
        DataError, match=r"sample 5 of epoch 0: DataError: .*s000\.jsonl, sample 5 of 16: JSONDecodeError"
    ):
        loaded("raise")


def test_random_numbers_belong_to_the_sample(tmp_path: Path) -> None:
    def noise(sample: int) -> tuple[int, float]:
        return sample, random.random()

    write(tmp_path, "text", [20])
    made = ShardStream(tmp_path, decode=int, transform=noise, buffer=6)
    whole = dict(sample for _, sample in share(made, 1, seed=4))
    parts = [share(made, 1, seed=4, shares=[13, 7], consumer=one, taken=2) for one in (0, 1)]
    assert len({*whole.values()}) == 20
    assert all(whole[number] == drawn for part in parts for _, (number, drawn) in part)
    assert dict(sample for _, sample in share(made, 2, seed=4)).keys() == whole.keys()


def test_no_shard_stays_open(tmp_path: Path) -> None:
    made = stream(write(tmp_path, "tar", [3] * 9), "tar", buffer=2)
    given = [made.begin(0, seed=0, done=None, shares=[27], consumer=0, taken=0) for _ in range(3)]
    for one in given:
        next(one)
    assert held(tmp_path) == 3
    given.clear()
    del one
    assert held(tmp_path) == 0


def held(folder: Path) -> int:
    """Files below a folder that this process has open."""
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(fd).startswith(str(folder)) for fd in fds if os.path.exists(fd))
