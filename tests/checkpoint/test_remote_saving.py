"""A save counts when it is published remotely, and a restart elsewhere continues from there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_support import save
from remote_support import (
    assert_resumes,
    make_tier,
    names,
    open_remote,
    remote_reader,
    save_remotely,
    small_state,
)

from framework.checkpoint import CheckpointStore, SaveHeader
from framework.checkpoint.remote import merge
from framework.checkpoint.remote.claim import CLAIM
from framework.checkpoint.retention import Keep
from framework.errors import CheckpointError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def elsewhere(tmp_path: Path) -> CheckpointStore:
    """The empty run directory of another host."""
    return CheckpointStore(tmp_path / "another-host" / "checkpoints")


def test_a_save_is_committed_when_both_tiers_hold_the_same_files(store: CheckpointStore, place: Path) -> None:
    tier = make_tier(place, store)
    result = save_remotely(tier, 5)
    assert result.committed and result.local and result.tier == "both" and result.error is None
    assert result.upload_seconds is not None and result.persist_seconds >= result.upload_seconds
    here = {f"step_0000000005/{path.name}": path.read_bytes() for path in result.path.iterdir()}
    there = {path.relative_to(place / "a-run").as_posix(): path.read_bytes() for path in place.rglob("step_*/*")}
    assert here == there and "step_0000000005/.metadata" in here
    assert [one.tier for one in merge(store.list(), tier.list())] == ["both"]


def test_another_host_continues_from_the_remote_copy(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path
) -> None:
    first = make_tier(place, store)
    for step in (1, 2):
        assert save_remotely(first, step).committed
    shutil.rmtree(store.path)
    second = make_tier(place, elsewhere, attempt=2)
    assert_resumes(second, 2)
    assert [found.step for found in elsewhere.list()] == [2]  # only what was needed
    assert save_remotely(second, 3).committed
    assert [copy.step for copy in first.list()] == [3, 2, 1]


def test_nothing_that_is_here_with_the_right_bytes_is_fetched(
    store: CheckpointStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(place, store)
    result = save_remotely(tier, 4)
    fetched: list[str] = []
    real = type(tier.volume).read_into

    def read_into(self: object, name: str, *arguments: object) -> None:
        fetched.append(name.rpartition("/")[2])
        real(self, name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(tier.volume), "read_into", read_into)
    assert_resumes(tier, 4)
    assert fetched == []
    (shard,) = result.path.glob("*.distcp")
    (shared,) = result.path.glob("shared.*")
    shared.unlink()
    assert_resumes(tier, 4)
    assert fetched == [shared.name]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert_resumes(tier, 4)
    assert fetched == [shared.name, shard.name]
    (result.path / ".metadata").unlink()
    assert_resumes(tier, 4)
    assert len(fetched) == 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_local_copy_that_is_repaired_is_told_of_with_the_file(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(place, store)
    folder = save_remotely(tier, 4).path
    (shard,), (shared,) = folder.glob("*.distcp"), folder.glob("shared.*")
    assert_resumes(tier, 4)
    assert_resumes(make_tier(place, elsewhere, attempt=2), 4)  # nothing was here, so nothing was repaired
    assert "repaired" not in caplog.text
    flip(shard)
    assert_resumes(tier, 4)
    shared.unlink()
    assert_resumes(tier, 4)
    told = [record.getMessage() for record in caplog.records if "was damaged, and repaired from" in record.message]
    assert all(str(folder) in text and str(place) in text for text in told) and len(told) == 2
    assert shard.name in told[0] and shared.name in told[1]
    assert [path for path, _ in tier.repaired] == [folder, folder] and shard.name in tier.repaired[0][1]


def test_when_both_copies_are_damaged_both_are_named(
    store: CheckpointStore, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(place, store)
    for step in (1, 2):
        save_remotely(tier, step)
    for path in (store.folder(2), place / "a-run" / "step_0000000002"):
        (shard,) = path.glob("*.distcp")
        flip(shard)
    reader = assert_resumes(tier, 1)
    assert [one.path for one in reader.rejected] == [store.folder(2)] and tier.repaired == []
    (far,) = [text for text in caplog.messages if "cannot be used, and stays there" in text]
    assert str(place / "a-run" / "step_0000000002") in far and shard.name in far
    assert any(f"{store.folder(2)} is damaged and was set aside" in text for text in caplog.messages)


def test_a_local_checkpoint_that_is_newer_than_all_remote_ones_is_used(store: CheckpointStore, place: Path) -> None:
    tier = make_tier(place, store)
    save_remotely(tier, 1)
    save(store, 2)
    assert_resumes(tier, 2)
    assert [one.tier for one in merge(store.list(), tier.list())] == ["local", "both"]


def test_of_two_saves_of_one_step_the_later_one_wins(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path
) -> None:
    save(store, 7)  # on a host that was cut off; the run went on elsewhere
    other = make_tier(place, elsewhere, attempt=2)
    assert save_remotely(other, 7, SaveHeader(7, metrics={"later": 1.0})).committed
    tier = make_tier(place, store, attempt=3)
    found = remote_reader(tier).newest_valid()
    assert found is not None and found.manifest.metrics == {"later": 1.0} and found.path == store.folder(7)
    save(store, 7, attempt=4, header=SaveHeader(7, metrics={"latest": 1.0}))
    found = remote_reader(tier).newest_valid()
    assert found is not None and found.manifest.metrics == {"latest": 1.0}


def test_a_damaged_remote_checkpoint_is_named_and_the_one_before_is_used(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path
) -> None:
    tier = make_tier(place, store)
    for step in (1, 2, 3):
        save_remotely(tier, step)
    (shard,) = (place / "a-run" / "step_0000000003").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[100] ^= 4
    shard.write_bytes(data)
    (shared,) = (place / "a-run" / "step_0000000002").glob("shared.*")
    shared.unlink()
    second = make_tier(place, elsewhere, attempt=2)
    reader = assert_resumes(second, 1)
    reasons = [one.reason for one in reader.rejected]
    assert shard.name in reasons[0] and "damaged" in reasons[0] and f"{shared.name} is missing" in reasons[1]
    assert [found.step for found in elsewhere.list()] == [1]
    damage = {copy.step: copy.damage for copy in second.list()}
    assert damage[1] is None and shard.name in str(damage[3])  # nobody fetches it again
    assert save_remotely(second, 3).committed  # but the step can be saved anew
    assert_resumes(make_tier(place, CheckpointStore(elsewhere.path.parent / "third"), attempt=3), 3)


def test_when_nothing_remote_is_whole_it_is_an_error_that_names_all(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path
) -> None:
    tier = make_tier(place, store)
    save_remotely(tier, 1)
    for path in place.rglob("*.distcp"):
        path.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"(?s)None of 1 checkpoint in .*another-host.*remote.*distcp has 0 bytes"
    ):
        remote_reader(make_tier(place, elsewhere, attempt=2)).newest_valid()
    assert not elsewhere.path.exists() or not list(elsewhere.path.glob("step_*"))


def test_an_attempt_whose_claim_was_replaced_neither_publishes_nor_deletes(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path
) -> None:
    zombie = make_tier(place, store)
    for step in (1, 2):
        assert save_remotely(zombie, step).committed
    make_tier(place, elsewhere, attempt=2)
    before = names(place)
    result = save_remotely(zombie, 3)
    assert not result.committed and result.local
    assert result.error is not None and "superseded" in result.error and "attempt 2 on" in result.error
    with pytest.raises(CheckpointError, match="superseded"):
        zombie.retain(Keep(last=1))
    assert names(place) == before


def test_a_claim_that_arrives_during_an_upload_stops_it_before_it_is_published(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path
) -> None:
    zombie = make_tier(place, store)
    upload = zombie.volume.upload

    def claimed_meanwhile(*arguments: object) -> None:
        upload(*arguments)  # type: ignore[arg-type]
        make_tier(place, elsewhere, attempt=2)

    zombie.volume.upload = claimed_meanwhile  # type: ignore[method-assign]
    result = save_remotely(zombie, 3)
    assert not result.committed and "superseded" in str(result.error)
    assert "step_0000000003/.metadata" not in names(place)


def test_a_place_whose_claim_is_gone_is_another_one(store: CheckpointStore, place: Path) -> None:
    """As when the volume was unmounted, and what is written lands below the mount point."""
    tier = make_tier(place, store)
    assert save_remotely(tier, 1).committed
    place.rename(place.with_name("elsewhere"))
    result = save_remotely(tier, 2)
    assert not result.committed and result.local and CLAIM in (result.error or "")
    assert not list(place.rglob("*.distcp"))


def test_a_claim_that_is_damaged_is_nobodys(store: CheckpointStore, place: Path) -> None:
    tier = make_tier(place, store)
    for step, content in enumerate((b"", b"{}", b"[1]", b"\xff"), 1):
        tier.volume.put(CLAIM, content)
        assert save_remotely(tier, step).committed


def test_retention_counts_remote_checkpoints_and_local_copies_leave_when_uploaded(
    store: CheckpointStore, place: Path
) -> None:
    tier = make_tier(place, store, keep_local=1)
    for step in range(1, 6):
        assert save_remotely(tier, step, keep=Keep(last=2, every=3)).committed
    assert [copy.step for copy in tier.list()] == [5, 4, 3]
    assert [found.step for found in store.list()] == [5]
    save(store, 6)  # never uploaded
    tier.retain(Keep(last=2, every=3))
    assert [found.step for found in store.list()] == [6, 5]
    assert save_remotely(tier, 7, keep=Keep(last=1)).committed
    assert [copy.step for copy in tier.list()] == [7]
    assert [found.step for found in store.list()] == [7]


def test_retention_deletes_metadata_first_and_nothing_while_the_newest_is_damaged(
    store: CheckpointStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(place, store)
    for step in (1, 2, 3):
        save_remotely(tier, step)
    (shard,) = (place / "a-run" / "step_0000000003").glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert tier.retain(Keep(last=1)) == [] and len(tier.list()) == 3
    shard.write_bytes(content)
    seen: list[set[str]] = []
    real = type(tier.volume).delete_folder

    def delete_folder(self: object, folder: str) -> None:
        seen.append({name for name in names(place) if name.startswith(folder)})
        real(self, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(type(tier.volume), "delete_folder", delete_folder)
    tier.retain(Keep(last=1))
    assert len(seen) == 2 and all(files and not any("/.metadata" in name for name in files) for files in seen)
    assert [copy.step for copy in tier.list()] == [3]


def test_what_was_never_published_is_removed_once_something_newer_is(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path
) -> None:
    dead = make_tier(place, elsewhere)
    save_remotely(dead, 2)
    dead.volume.delete("step_0000000002/.metadata")
    dead.volume.put("step_0000000003/__0_0.000001-00000000-000009.distcp", b"part of a save that was killed")
    tier = make_tier(place, store, attempt=2)
    assert save_remotely(tier, 3, keep=Keep()).committed
    assert {name.partition("/")[0] for name in names(place)} == {CLAIM, "step_0000000003"}
    (copy,) = tier.list()
    assert {name for name in names(place) if "/" in name} == {
        f"step_0000000003/{name}" for name in (".metadata", copy.manifest_name, *copy.manifest.files)
    }


def test_pushing_again_needs_only_what_is_missing(store: CheckpointStore, place: Path) -> None:
    tier = make_tier(place, store)
    assert tier.push_again() is None
    (place / "a-run" / "step_0000000009").write_bytes(b"a file where the folder should be")
    result = save_remotely(tier, 9)
    assert not result.committed and result.local and "step_0000000009" in str(result.error)
    assert tier.pending is not None
    (place / "a-run" / "step_0000000009").unlink()
    again = tier.push_again()
    assert again is not None and again.committed and again.tier == "both" and again.step == 9
    assert tier.pending is None and tier.push_again() is None
    with_error = replace(again, committed=False, error="the disk is full")
    assert tier.push(with_error) is with_error  # what is not committed here is not sent


def test_a_damaged_local_file_is_not_uploaded(store: CheckpointStore, place: Path) -> None:
    tier = make_tier(place, store)
    result = save(store, 1)
    (shard,) = result.path.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    pushed = tier.push(result)
    assert not pushed.committed and shard.name in str(pushed.error) and "checksum" in str(pushed.error)
    assert not any(name.endswith((shard.name, ".metadata")) for name in names(place))


def test_too_little_space_is_said_before_anything_is_fetched(
    store: CheckpointStore, elsewhere: CheckpointStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_remotely(make_tier(place, store), 1)
    usage = shutil.disk_usage(place)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"does not fit on the disk of .*another-host.*are to be fetched"):
        remote_reader(make_tier(place, elsewhere, attempt=2)).newest_valid()
    assert not list(elsewhere.path.rglob("*.distcp"))


def test_memory_is_a_place_too(store: CheckpointStore, elsewhere: CheckpointStore) -> None:
    place = f"memory://{store.path.parent.parent.name}"
    assert save_remotely(make_tier(place, store), 1).committed
    assert_resumes(make_tier(place, elsewhere, attempt=2), 1)
    assert open_remote(place).size(CLAIM)
    assert small_state(1).shared
