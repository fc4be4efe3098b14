"""Object stores that fail: what passes is waited out, what does not is an error that says what to do."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import boto3
import pytest
from support.storage import S3

from framework.volume import (
    Volume,
    VolumeDenied,
    VolumeError,
    VolumeExists,
    VolumeMissing,
    VolumeUnsupported,
    open_volume,
)
from framework.volume.failures import Failure

PART = 8 << 20
DATA = os.urandom(2 * PART + 1000)


def opened(s3: S3, seconds: float = 60.0) -> Volume:
    return open_volume(s3.url, retry_seconds=seconds)


def unfinished(s3: S3) -> int:
    """Uploads that were begun and neither completed nor given up."""
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3.server.port}")
    return len(client.list_multipart_uploads(Bucket=s3.bucket).get("Uploads", []))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_store_that_fails_for_a_while_is_waited_out(s3: S3, status: int) -> None:
    volume = opened(s3)
    s3.proxy.fail(status, count=3)
    volume.put("a", b"123")
    s3.proxy.fail(status, count=2)
    assert volume.read("a") == b"123"
    s3.proxy.fail(status, count=2)
    assert [entry.name for entry in volume.list()] == ["a"]
    s3.proxy.fail(status, count=2)
    volume.delete("a")
    assert volume.size("a") is None and s3.proxy.met == 9


@pytest.mark.parametrize(("status", "may_pass", "is_busy"), [(429, True, True), (503, True, True), (500, True, False)])
def test_an_error_says_whether_it_may_pass_and_whether_the_store_is_busy(
    s3: S3, status: int, may_pass: bool, is_busy: bool
) -> None:
    volume = opened(s3, 0.0)
    volume.put("a", b"123")
    before = len(s3.proxy.log)
    s3.proxy.fail(status)
    with pytest.raises(VolumeError) as caught:
        volume.piece("a", 0, 3)
    assert (caught.value.may_pass, caught.value.is_busy) == (may_pass, is_busy)
    assert len(s3.proxy.log) == before + 1  # without time to try again there is one request


def test_errors_that_will_not_pass_say_so(s3: S3) -> None:
    volume = opened(s3, 0.0)
    for call in (lambda: volume.piece("gone", 0, 3), lambda: open_volume("s3://no-such-bucket/x").piece("a", 0, 1)):
        with pytest.raises(VolumeError) as caught:
            call()
        assert not caught.value.may_pass and not caught.value.is_busy


def test_trying_again_leaves_the_random_numbers_of_the_run_alone(s3: S3) -> None:
    volume = opened(s3)
    before = random.getstate()
    s3.proxy.cut(1, count=2, method="PUT")
    s3.proxy.truncate(1, count=2)
    volume.put("a", b"123")
    assert volume.read("a") == b"123" and s3.proxy.met == 4
    assert random.getstate() == before


def test_a_large_upload_survives_errors_and_cut_connections(s3: S3) -> None:
    volume = opened(s3)
    s3.proxy.fail(500, seconds=0.5, method="PUT")
    s3.proxy.fail(503, count=1, method="POST")
    s3.proxy.cut(300_000, count=2, method="PUT")
    volume.upload("big", iter([DATA]), len(DATA))
    assert s3.proxy.met >= 4
    s3.proxy.cut(300_000, count=2, method="GET")
    s3.proxy.fail(500, count=2, method="GET")
    assert volume.read("big") == DATA
    assert unfinished(s3) == 0


def test_a_store_that_stays_broken_is_named_with_cause_and_attempts(s3: S3) -> None:
    volume = opened(s3, 0.4)
    volume.put("a", b"123")
    s3.proxy.fail(503)
    for call in (
        lambda: volume.put("a", b"1"),
        lambda: volume.read("a"),
        lambda: volume.size("a"),
        lambda: volume.upload("a", [DATA], len(DATA)),
        lambda: list(volume.list()),
        lambda: volume.probe(),
    ):
        with pytest.raises(VolumeError, match=r"after \d+ attempts: .*503") as caught:
            call()
        assert s3.url in str(caught.value) and "Debug source" not in str(caught.value)
        assert type(caught.value) is VolumeError
    s3.proxy.heal()
    assert volume.read("a") == b"123" and unfinished(s3) == 0


def test_a_store_that_is_away_is_named(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(VolumeError, match=f"{s3.url}.* attempts: .*{port}.*Connection refused"):
            opened(s3, 0.5).put("a", b"1")


def test_an_answer_that_does_not_come_is_given_up(s3: S3) -> None:
    volume = open_volume(s3.url, retry_seconds=0.5, options={"timeout": "200ms"})
    s3.proxy.delay(3)
    with pytest.raises(VolumeError, match=f"{s3.url}/a failed after .* attempts.*no answer in time"):
        volume.put("a", b"1")


def test_refusals_are_not_tried_again(s3: S3) -> None:
    volume = opened(s3)
    volume.put("a", b"123")
    s3.proxy.deny()
    for call in (
        lambda: volume.put("a", b"1"),
        lambda: volume.read("a"),
        lambda: volume.read("a", 1, 1),
        lambda: volume.size("a"),
        lambda: volume.upload("a", [DATA], len(DATA)),
        lambda: list(volume.list()),
        lambda: volume.folders(),
        lambda: volume.delete("a"),
        lambda: volume.delete_folder(""),
        lambda: volume.probe(),
    ):
        before = len(s3.proxy.log)
        with pytest.raises(VolumeDenied, match="redentials") as caught:
            call()
        assert s3.url in str(caught.value) and len(s3.proxy.log) - before <= 2
    s3.proxy.heal()
    before = len(s3.proxy.log)
    with pytest.raises(VolumeMissing):
        volume.read("gone", 0, 3)
    assert len(s3.proxy.log) - before == 1
    assert volume.read("a") == b"123"


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_expire_in_the_middle_say_so(s3: S3, status: int) -> None:
    volume = opened(s3)
    s3.proxy.deny("ExpiredToken", status, after=2, method="PUT")
    with pytest.raises(VolumeDenied, match="expired: renew them") as caught:
        volume.upload("big", iter([DATA]), len(DATA))
    assert f"{s3.url}/big" in str(caught.value) and "ExpiredToken" in str(caught.value)
    s3.proxy.heal()
    assert volume.size("big") is None and unfinished(s3) == 0


def test_bytes_that_a_store_took_and_lost_are_noticed(s3: S3) -> None:
    volume = opened(s3)
    s3.proxy.lose(count=1)
    volume.put("new", b"123")
    assert volume.read("new") == b"123" and s3.proxy.requests("PUT") == 2
    s3.proxy.lose(count=1)
    volume.put("new", b"456")  # of the same size: only the sum tells
    assert volume.read("new") == b"456"
    s3.proxy.lose()
    for call in (
        lambda: volume.put("lost", b"123"),
        lambda: volume.put("new", b"789"),
        lambda: volume.put("lost", b"123", exclusive=True),
        lambda: volume.upload("lost", [b"123"], 3),
        lambda: volume.probe(),
    ):
        with pytest.raises(VolumeError, match=r"answered success.*lost"):
            call()
    s3.proxy.heal()
    assert [entry.name for entry in volume.list()] == ["new"]


def test_bytes_that_a_store_cut_are_noticed(s3: S3) -> None:
    volume = opened(s3)
    s3.proxy.truncate(2, method="PUT", count=1)
    volume.put("a", b"12345")
    assert volume.read("a") == b"12345"
    s3.proxy.truncate(1_000_000, method="PUT", path="*partNumber=3*", count=1)
    s3.proxy.truncate(PART // 2, method="PUT", path="*partNumber=1*", count=1)
    with pytest.raises(VolumeError, match=r"big.*(lost|EntityTooSmall|smaller)"):
        volume.upload("big", iter([DATA]), len(DATA))
    assert volume.size("big") is None
    volume.upload("big", iter([DATA]), len(DATA))
    assert volume.read("big") == DATA


def test_answers_that_end_early_are_noticed(s3: S3) -> None:
    volume = opened(s3)
    volume.put("a", b"0123456789")
    for call in (lambda: volume.read("a"), lambda: volume.read("a", 0, 10)):
        s3.proxy.truncate(4, count=2)
        assert call() == b"0123456789"
        s3.proxy.cut(4, count=2, method="GET")
        assert call() == b"0123456789"
    s3.proxy.truncate(4)
    with pytest.raises(VolumeError, match="4 of 10 bytes"):
        volume.read("a")
    with pytest.raises(VolumeError, match="4 of 6 bytes"):
        volume.read_into("a", 2, memoryview(bytearray(6)))


def test_an_exclusive_put_whose_answer_was_lost_is_still_ours(s3: S3) -> None:
    volume = opened(s3)
    s3.proxy.cut(0, method="PUT", count=1)  # never arrives
    volume.put("claim", b"mine", exclusive=True)
    s3.proxy.fail(500, method="HEAD", count=1)
    volume.put("other", b"mine", exclusive=True)
    s3.proxy.fail(503, method="PUT", count=1)
    with pytest.raises(VolumeExists):
        volume.put("claim", b"theirs", exclusive=True)
    assert volume.read("claim") == volume.read("other") == b"mine"


def test_a_store_that_knows_no_exclusive_put_says_so(s3: S3) -> None:
    volume = open_volume(s3.url, retry_seconds=0)
    s3.proxy.fail(501, method="PUT", count=1)
    with pytest.raises(VolumeUnsupported, match=r"the store cannot do this: .*501"):
        volume.put("claim", b"mine", exclusive=True)
    assert volume.size("claim") is None


def test_a_slow_store_is_only_slow(s3: S3) -> None:
    volume = opened(s3)
    s3.proxy.limit(40_000_000)
    started = time.monotonic()
    volume.upload("big", iter([DATA]), len(DATA))
    assert volume.read("big") == DATA
    assert time.monotonic() - started > 0.5 * 2 * len(DATA) / 40_000_000  # the proxy did limit


def test_parts_travel_side_by_side(s3: S3) -> None:
    volume = opened(s3)
    s3.proxy.delay(0.3)
    volume.upload("big", iter([DATA]), len(DATA))
    assert s3.proxy.most > 1
    s3.proxy.most = 0
    volume.read_into("big", 0, memoryview(bytearray(len(DATA))))
    assert s3.proxy.most > 1


def test_a_source_that_fails_leaves_no_upload_open(s3: S3) -> None:
    def parts() -> Iterator[bytes]:
        yield DATA
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        opened(s3).upload("big", parts(), 2 * len(DATA))
    assert opened(s3).size("big") is None and unfinished(s3) == 0


def test_secrets_stay_out_of_messages(s3: S3) -> None:
    volume = opened(s3, 0.2)
    s3.proxy.fail(500)
    with pytest.raises(VolumeError) as caught:
        volume.put("a", b"1")
    assert "secret-of-tests" not in str(caught.value) and caught.value.__cause__ is None


def test_a_bucket_that_is_not_there_is_named(s3: S3) -> None:
    volume = open_volume("s3://no-such-bucket/x")
    for call in (lambda: volume.put("a", b"1"), lambda: list(volume.list()), lambda: volume.probe()):
        with pytest.raises(VolumeError, match=r"s3://no-such-bucket/x.*NoSuchBucket"):
            call()


def test_options_that_obstore_does_not_know_are_named(s3: S3) -> None:
    with pytest.raises(VolumeError, match=r"(?s)s3://.*no_such_option"):
        open_volume(s3.url, options={"no_such_option": "1"}).size("a")


@pytest.mark.soak
def test_folders_of_many_pages_are_listed_and_deleted(s3: S3) -> None:
    volume = opened(s3)
    for number in range(2_100):
        s3.server.ask("PUT", f"/{s3.bucket}/prefix/many/{number % 3}/{number}", b"1")
    volume.put("kept", b"1")
    assert len({entry.name for entry in volume.list("many")}) == 2_100 and volume.folders("many") == ["0", "1", "2"]
    volume.delete_folder("many")
    assert [entry.name for entry in volume.list()] == ["kept"]


def test_that_there_are_no_credentials_is_said_before_how_they_were_looked_for() -> None:
    cause = "Error performing PUT http://169.254.169.254/latest/api/token in 2s - HTTP error"
    message = str(Failure("denied", cause).error("s3://bucket/runs", 3))
    assert message.startswith("s3://bucket/runs: No credentials were found: set ")
    assert message.index("AWS_ACCESS_KEY_ID") < message.index(cause)
