"""Files of an object store that refuses, is away, cuts and changes what it has come whole or with an error."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lookahead_support import content, listed_volume, name_of, read_all, wait_for
from support.storage import S3

from framework.data.files.source import FileSource
from framework.errors import DataError
from framework.volume import open_volume

COUNT = 40

Opened = Callable[..., FileSource]


def put(s3: S3, name: str, data: bytes) -> None:
    s3.server.ask("PUT", f"/{s3.bucket}/prefix/{name}", data)


@pytest.fixture
def opened(s3: S3) -> Iterator[Opened]:
    """`opened(**options)` is a source of the bucket's files, closed at the end."""
    for index in range(COUNT):
        put(s3, name_of(index), content(index))
    sources: list[FileSource] = []

    def make(**options: Any) -> FileSource:
        sources.append(FileSource(s3.url, None, listed_volume(s3.url), **options))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


def error_of(source: FileSource, index: int) -> str:
    with pytest.raises(DataError) as caught:
        source.bytes_of(index)
    return str(caught.value)


def limit_of(source: FileSource) -> float:
    """How many requests at once the source allows itself."""
    return source._mine()._reader.limiter.limit


def gets(s3: S3) -> int:
    return s3.proxy.requests("GET", "*.bin")


def test_objects_are_fetched_at_once_and_once(opened: Opened, s3: S3) -> None:
    source = opened()
    s3.proxy.most = 0
    s3.proxy.delay(0.05)
    source.prefetch(range(COUNT))
    read_all(source, COUNT)
    assert gets(s3) == COUNT and 4 <= s3.proxy.most <= 64
    assert source.take_stats().bytes_fetched == COUNT * 3000


@pytest.mark.parametrize("status", [429, 503])
def test_a_store_that_refuses_a_third_of_the_requests_loses_nothing_and_gets_fewer(
    opened: Opened, s3: S3, status: int
) -> None:
    source = opened()
    s3.proxy.fail(status, every=3)
    source.prefetch(range(COUNT))
    read_all(source, COUNT)
    stats = source.take_stats()
    assert stats.retries == s3.proxy.met > COUNT / 3 and stats.cache_misses == COUNT
    assert limit_of(source) < 12  # of the first 16 or so at once, half


def test_other_errors_are_tried_again_without_fewer_requests(opened: Opened, s3: S3) -> None:
    source = opened()
    before = limit_of(source)
    s3.proxy.fail(500, every=4)
    s3.proxy.cut(100, method="GET", count=4)
    source.prefetch(range(COUNT))
    read_all(source, COUNT)
    assert source.take_stats().retries == s3.proxy.met > 0
    assert limit_of(source) == before


def outage(opened: Opened, s3: S3, seconds: float) -> None:
    source = opened()
    source.prefetch(range(COUNT))
    read_all(source, 10)
    copy = opened()
    s3.proxy.stop()
    copy.prefetch(range(COUNT))
    back = threading.Timer(seconds, s3.proxy.start)
    back.start()
    try:
        read_all(copy, COUNT)
        for index in range(10, COUNT):
            assert source.bytes_of(index) == content(index)
    finally:
        back.join()
    assert copy.take_stats().retries > 0


def test_a_store_that_is_stopped_for_a_moment_is_waited_for(opened: Opened, s3: S3) -> None:
    outage(opened, s3, 0.5)


@pytest.mark.soak
def test_a_store_that_is_stopped_for_20_seconds_is_waited_for(opened: Opened, s3: S3) -> None:
    outage(opened, s3, 20)


def test_a_store_that_stays_away_is_named_with_attempts(opened: Opened, s3: S3) -> None:
    source = opened(deadline_seconds=0.5)
    s3.proxy.stop()
    try:
        message = error_of(source, 7)
    finally:
        s3.proxy.start()
    assert f"{s3.url}/{name_of(7)} could not be read (" in message and "Connection refused" in message
    assert " attempts in " in message
    assert source.bytes_of(7) == content(7)


def test_an_object_that_comes_short_is_asked_for_again(opened: Opened, s3: S3) -> None:
    source = opened()
    s3.proxy.truncate(100, count=2)
    assert source.bytes_of(3) == content(3) and source.take_stats().retries == 2
    s3.proxy.truncate(100)
    message = error_of(source, 3)
    assert "(3 attempts in" in message and "100 bytes came of 3000" in message and f"{s3.url}/{name_of(3)}" in message


def test_objects_that_changed_since_they_were_listed_are_refused(opened: Opened, s3: S3) -> None:
    source, volume = opened(), open_volume(s3.url)
    volume.put(name_of(1), content(1)[:-1])
    volume.put(name_of(2), content(2) + b"x")
    volume.put(name_of(3), content(33))
    source.prefetch(range(5))
    assert "it has 2999 bytes, and had 3000" in (message := error_of(source, 1)) and "(3 attempts in" in message
    assert "it has 3001 bytes, and had 3000" in error_of(source, 2)
    assert "it has other content than when it was listed" in error_of(source, 3)
    assert source.bytes_of(4) == content(4)


def test_what_will_not_pass_is_not_tried_again(opened: Opened, s3: S3) -> None:
    source = opened()
    before = gets(s3)
    s3.proxy.deny(path="*0001.bin*")
    assert "(1 attempt in" in (message := error_of(source, 1)) and "redentials" in message
    open_volume(s3.url).delete(name_of(2))
    assert "(1 attempt in" in (message := error_of(source, 2)) and "is not there" in message
    assert gets(s3) == before + 2
    assert "secret-of-tests" not in message


def test_an_answer_that_does_not_come_is_asked_for_again(opened: Opened, s3: S3) -> None:
    source = FileSource(s3.url, {"timeout": "300ms"}, listed_volume(s3.url))
    s3.proxy.delay(1.0)
    healing = threading.Timer(0.2, s3.proxy.heal)
    healing.start()
    assert source.bytes_of(3) == content(3) and source.take_stats().retries >= 1
    healing.join()
    source.close()


def test_a_large_object_comes_in_pieces_side_by_side(opened: Opened, s3: S3) -> None:
    data = os.urandom((33 << 20) + 3)
    put(s3, "big", data)
    source = opened()
    s3.proxy.fail(500, path="*big*", after=1, count=1)
    s3.proxy.most = 0
    s3.proxy.delay(0.1)
    assert source.bytes_of(0) == data
    assert (source.take_stats().retries, s3.proxy.requests("GET", "*big")) == (1, 5 + 1)
    assert 2 <= s3.proxy.most <= 4


def threads_of(kind: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == kind]


def test_a_large_object_that_cannot_be_read_is_an_error_and_nobody_goes_on_with_it(opened: Opened, s3: S3) -> None:
    put(s3, "big", os.urandom((33 << 20) + 3))
    source = opened()  # its deadline is far away
    s3.proxy.fail(500, path="*big*", count=2)
    s3.proxy.deny(path="*big*", count=1)  # mostly for the last piece: the first ones are tried again for long yet
    s3.proxy.fail(500, path="*big*")
    assert re.search(r"big could not be read \(\d attempts? in", error_of(source, 0))
    wait_for(lambda: not threads_of("piece fetcher"), "the end of the threads")
    s3.proxy.heal()
    assert source.bytes_of(1) == content(0)


def test_a_large_object_whose_requests_hang_is_given_up(opened: Opened, s3: S3) -> None:
    put(s3, "big", os.urandom((17 << 20) + 3))
    earlier = set(threading.enumerate())  # a source of another test may still wait for its requests
    source = opened(deadline_seconds=0.5)
    s3.proxy.delay(30.0)
    assert "big could not be read: attempt 1 has had no answer for" in error_of(source, 0)
    wait_for(lambda: not set(threads_of("file fetcher")) - earlier, "the end of the thread that waited for the pieces")
    assert threads_of("piece fetcher")
    s3.proxy.heal()
    assert source.bytes_of(1) == content(0)


def test_a_forked_child_reads_what_its_parent_reads(opened: Opened, s3: S3) -> None:
    source = opened()
    source.prefetch(range(COUNT))
    read_all(source, 5)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            source.prefetch(range(COUNT))
            read_all(source, COUNT)
            source.close()
            status = 0
        finally:
            os._exit(status)
    read_all(source, COUNT)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(done[1]) == 0


def test_stores_share_their_limit_in_a_process(opened: Opened, s3: S3) -> None:
    one, two = opened(), opened()
    s3.proxy.fail(503, count=8)
    one.prefetch(range(COUNT))
    read_all(one, COUNT)
    wait_for(lambda: limit_of(two) == limit_of(one), "the same limit")
    assert limit_of(two) < 64
