"""An object store that fails, refuses or loses: nothing half is published, and what is lost is said."""

from __future__ import annotations

import os
import random
import signal
import socket
import time

import pytest
from checkpoint_support import save
from remote_support import assert_resumes, make_tier, names, open_remote, remote_reader, save_remotely
from support.storage import S3, s3  # noqa: F401

from framework.checkpoint import CheckpointStore
from framework.checkpoint.remote import RemoteTier
from framework.checkpoint.retention import Keep
from framework.errors import CheckpointError


@pytest.fixture
def elsewhere(store: CheckpointStore) -> CheckpointStore:
    """The empty run directory of another host."""
    return CheckpointStore(store.path.parent.parent / "another-host" / "checkpoints")


def puts(s3: S3) -> list[str]:  # noqa: F811
    """Names of the objects that were put, in order."""
    return [path.partition("?")[0].rpartition("/")[2] for method, path in s3.proxy.log if method == "PUT"]


def test_metadata_is_put_once_and_after_everything_else(store: CheckpointStore, s3: S3) -> None:  # noqa: F811
    tier = make_tier(s3.url, store)
    before = len(puts(s3))
    assert save_remotely(tier, 1).committed
    order = puts(s3)[before:]
    (copy,) = tier.list()
    assert order[-1] == ".metadata" and order[-2] == copy.manifest_name
    assert sorted(order[:-2]) == sorted(copy.manifest.files)


def test_another_host_continues_from_an_object_store(
    store: CheckpointStore,
    elsewhere: CheckpointStore,
    s3: S3,  # noqa: F811
) -> None:
    tier = make_tier(s3.url, store)
    for step in (1, 2, 3):
        assert save_remotely(tier, step, keep=Keep(last=2)).committed
    s3.proxy.cut(100, count=1, method="GET", path="*.distcp*")  # retried
    assert_resumes(make_tier(s3.url, elsewhere, attempt=2), 3)
    assert [copy.step for copy in tier.list()] == [3, 2]


def test_a_spell_of_errors_is_waited_out(store: CheckpointStore, s3: S3) -> None:  # noqa: F811
    tier = make_tier(open_remote(s3.url, retry_seconds=60), store)
    s3.proxy.fail(500, seconds=1.5)
    result = save_remotely(tier, 1)
    assert result.committed, result.error
    assert s3.proxy.met > 1 and result.upload_seconds is not None


def test_after_a_long_outage_only_what_is_missing_is_sent(store: CheckpointStore, s3: S3) -> None:  # noqa: F811
    tier = make_tier(open_remote(s3.url, retry_seconds=0.5), store)
    s3.proxy.fail(503, path="*shared.*", method="PUT")
    result = save_remotely(tier, 1)
    assert not result.committed and result.local
    assert s3.url in str(result.error) and "shared." in str(result.error) and "503" in str(result.error)
    assert ".metadata" not in puts(s3)
    again = tier.push_again()
    assert again is not None and not again.committed
    s3.proxy.heal()
    before = len(puts(s3))
    again = tier.push_again()
    assert again is not None and again.committed
    assert [name.partition(".")[0] for name in puts(s3)[before:]] == ["shared", "manifest", ""]
    assert [copy.damage for copy in tier.list()] == [None]


def test_a_failed_upload_is_made_up_for_by_the_next_save(store: CheckpointStore, s3: S3) -> None:  # noqa: F811
    tier = make_tier(open_remote(s3.url, retry_seconds=0.5), store)
    s3.proxy.fail(500, method="PUT")
    assert not save_remotely(tier, 1).committed
    s3.proxy.heal()
    assert save_remotely(tier, 2).committed and tier.pending is None
    assert [copy.step for copy in tier.list()] == [2] and [found.step for found in store.list()] == [2, 1]


def test_credentials_that_expire_are_said_at_once_with_the_url(store: CheckpointStore, s3: S3) -> None:  # noqa: F811
    tier = make_tier(open_remote(s3.url, retry_seconds=300), store)
    s3.proxy.deny("ExpiredToken")
    result = save_remotely(tier, 1)
    assert not result.committed and result.local and s3.url in str(result.error)
    with pytest.raises(CheckpointError, match=f"cannot be kept in {s3.url}.*credentials"):
        tier.probe()


def test_a_place_out_of_reach_is_an_error_and_no_fresh_start(
    store: CheckpointStore,
    s3: S3,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_remotely(make_tier(s3.url, store), 1)
    tier = make_tier(open_remote(s3.url, retry_seconds=0.5), store)
    s3.proxy.fail(500)
    with pytest.raises(CheckpointError, match=s3.url):
        remote_reader(tier).newest_valid()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        tier.volume = open_remote(s3.url, retry_seconds=0.5)
        tier.listing.volume = tier.volume
        with pytest.raises(CheckpointError, match=s3.url):
            remote_reader(tier).newest_valid()


def test_a_store_that_drops_what_it_took_is_noticed_before_anything_is_published(
    store: CheckpointStore,
    s3: S3,  # noqa: F811
) -> None:
    tier = make_tier(s3.url, store)
    s3.proxy.lose(path="*manifest.*")
    result = save_remotely(tier, 1)
    assert not result.committed and result.local
    assert "manifest." in str(result.error) and ".metadata" not in puts(s3)


def test_bytes_that_arrive_wrong_are_not_used(
    store: CheckpointStore,
    elsewhere: CheckpointStore,
    s3: S3,  # noqa: F811
) -> None:
    tier = make_tier(s3.url, store)
    for step in (1, 2):
        save_remotely(tier, step)
    (copy, _) = tier.list()
    name = next(name for name in copy.manifest.files if name.endswith(".distcp"))
    other = bytearray(tier.volume.read(f"step_0000000002/{name}"))
    other[1000] ^= 1
    tier.volume.put(f"step_0000000002/{name}", bytes(other))
    reader = assert_resumes(make_tier(s3.url, elsewhere, attempt=2), 1)
    assert name in reader.rejected[0].reason and s3.url in reader.rejected[0].reason


def _kill_while_saving(s3: S3, store: CheckpointStore, attempt: int, requests: int) -> None:  # noqa: F811
    """A run that saves on and on, killed after its n-th request."""
    begin = len(s3.proxy.log)
    pid = os.fork()
    if pid == 0:
        try:
            tier = make_tier(s3.url, store, attempt=attempt)
            found = remote_reader(tier).newest_valid()
            step = found.step if found is not None else 0
            while True:
                step += 1
                save_remotely(tier, step, keep=Keep(last=2))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while len(s3.proxy.log) < begin + requests and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def _killed(s3: S3, store: CheckpointStore, rounds: int) -> None:  # noqa: F811
    chance = random.Random(rounds)
    newest = 0
    for attempt in range(1, rounds + 1):
        fresh = CheckpointStore(store.path.parent.parent / f"host-{attempt}" / "checkpoints")
        _kill_while_saving(s3, fresh, attempt, chance.randint(5, 60))
        copies = open_remote(s3.url)
        tier = make_tier(copies, CheckpointStore(store.path.parent.parent / f"look-{attempt}"), attempt=1000 + attempt)
        listed = tier.list()
        assert all(copy.damage is None for copy in listed)
        now = listed[0].step if listed else 0
        assert now >= newest
        newest = now
        if listed:
            assert_resumes(tier, newest)
    assert newest > 0
    assert save_remotely(tier, newest + 1, keep=Keep(last=1)).committed
    assert {name.partition("/")[0] for name in names(s3.url)} == {"claim.json", f"step_{newest + 1:010d}"}


def test_killed_in_the_middle_of_uploads_only_whole_checkpoints_are_there(
    store: CheckpointStore,
    s3: S3,  # noqa: F811
) -> None:
    _killed(s3, store, 5)


@pytest.mark.soak
def test_killed_a_hundred_times_in_the_middle_of_uploads(store: CheckpointStore, s3: S3) -> None:  # noqa: F811
    _killed(s3, store, 100)


def test_killed_while_fetching_nothing_half_is_here_and_what_arrived_is_used(
    store: CheckpointStore,
    elsewhere: CheckpointStore,
    s3: S3,  # noqa: F811
) -> None:
    assert save_remotely(make_tier(s3.url, store), 1).committed
    make_tier(s3.url, elsewhere, attempt=2)
    s3.proxy.log.clear()
    s3.proxy.delay(0.02)
    pid = os.fork()
    if pid == 0:
        try:
            remote_reader(make_tier(s3.url, elsewhere, attempt=2)).newest_valid()
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    staged = elsewhere.path / ".fetch-step_0000000001"
    while not list(staged.glob("*.distcp")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert elsewhere.list() == [] and list(staged.iterdir())
    s3.proxy.heal()
    tier = make_tier(s3.url, elsewhere, attempt=3)
    assert_resumes(tier, 1)
    assert {path.name for path in elsewhere.path.iterdir() if path.is_dir()} == {"step_0000000001"}


def test_a_local_save_alone_is_no_commit_where_a_remote_is_configured(store: CheckpointStore, s3: S3) -> None:  # noqa: F811
    save(store, 1)
    tier = make_tier(open_remote(s3.url, retry_seconds=0.5), store)
    s3.proxy.fail(500)
    assert tier.push(save(store, 2)).tier == "local"


def test_what_another_attempt_publishes_between_the_last_check_and_the_put_stays(
    store: CheckpointStore,
    elsewhere: CheckpointStore,
    s3: S3,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, checks = make_tier(s3.url, store), []
    check = tier.check_claim

    def late() -> None:
        check()
        checks.append(True)
        if len(checks) == 2:  # the first one is before the upload
            assert save_remotely(make_tier(s3.url, elsewhere, attempt=2), 1).committed

    monkeypatch.setattr(tier, "check_claim", late)
    result = save_remotely(tier, 1)
    assert not result.committed and result.local and ".metadata was published meanwhile" in str(result.error)
    third = make_tier(s3.url, CheckpointStore(store.path.parent.parent / "third" / "checkpoints"), attempt=3)
    assert assert_resumes(third, 1) and third.list()[0].manifest.attempt == 2


def test_a_store_without_conditional_puts_is_asked_once_and_written_without_them(
    store: CheckpointStore,
    elsewhere: CheckpointStore,
    s3: S3,  # noqa: F811
) -> None:
    tier = make_tier(open_remote(s3.url, retry_seconds=0), store)
    s3.proxy.fail(501, method="PUT", path="*/.metadata", count=1)
    for step, puts_so_far in ((1, 2), (2, 3)):
        result = save_remotely(tier, step)
        assert result.committed, result.error
        assert s3.proxy.requests("PUT", "*/.metadata") == puts_so_far
    assert_resumes(make_tier(s3.url, elsewhere, attempt=2), 2)


def test_a_run_that_goes_back_needs_only_its_local_copies_while_the_place_is_away(
    store: CheckpointStore,
    elsewhere: CheckpointStore,
    s3: S3,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = make_tier(open_remote(s3.url, retry_seconds=0.3), store)
    for step in (1, 2):
        assert save_remotely(tier, step).committed
    s3.proxy.fail(503)
    reader = remote_reader(tier)
    with pytest.raises(CheckpointError, match="503"):
        reader.newest_valid()
    found = reader.newest_valid(local_suffices=True)
    assert found is not None and found.step == 2 and reader.remote is tier
    assert s3.url in caplog.text and "only the checkpoints in" in caplog.text
    nothing_here = remote_reader(RemoteTier(tier.volume, tier.group, store=elsewhere, run="r", attempt=1, token="t"))
    with pytest.raises(CheckpointError, match="503"):
        nothing_here.newest_valid(local_suffices=True)
