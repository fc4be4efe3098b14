"""Python values that are refused: what no save puts there is damage, what the user's code knows is the user's to allow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_support import assert_holds, make_reader, save, snapshot
from remote_support import assert_resumes, make_tier, save_remotely
from test_checkpoint_damage import Attack, file_of, reseal

from framework.checkpoint import CheckpointStore
from framework.checkpoint.remote.listing import MARK
from framework.errors import CheckpointError

KINDS = pytest.mark.parametrize("kind", ["shared", "rank_0"])
REFUSED = "holds something that is not loaded without running code"


class Own:
    """A class of the user's."""


def tamper(folder: Path, kind: str, values: object) -> None:
    """Replaces the values of a checkpoint and makes all checksums right again."""
    torch.save(values, file_of(folder, kind))
    reseal(folder)


@KINDS
def test_code_in_the_python_values_does_not_run_and_the_checkpoint_before_is_used(
    store: CheckpointStore, tmp_path: Path, kind: str
) -> None:
    for step in (1, 2):
        save(store, step)
    marker = tmp_path / "code-ran"
    tamper(store.folder(2), kind, {"step": Attack(marker)})
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    (rejected,) = reader.rejected
    assert kind in rejected.reason and REFUSED in rejected.reason and "mkdir" in rejected.reason
    assert rejected.moved_to is not None and rejected.moved_to.parent.name == "damaged"
    assert not marker.exists()
    assert_holds(store, 1)


@KINDS
def test_values_that_are_none_are_damage(store: CheckpointStore, kind: str) -> None:
    for step in (1, 2, 3):
        save(store, step)
    tamper(store.folder(3), kind, ["a list"])
    file_of(store.folder(2), kind).write_bytes(b"no archive")
    reseal(store.folder(2))
    assert_holds(store, 1)
    assert len(list((store.path / "damaged").glob("*.reason.txt"))) == 2


@KINDS
def test_a_class_of_the_users_is_an_error_that_says_how_to_allow_it(store: CheckpointStore, kind: str) -> None:
    for step in (1, 2):
        save(store, step)
    tamper(store.folder(2), kind, {"mine": Own()})
    before = snapshot(store.path)
    with pytest.raises(CheckpointError, match=rf"{store.folder(2)}: {kind}.*{REFUSED}.*Own.*add_safe_globals"):
        make_reader(store).newest_valid()
    assert snapshot(store.path) == before
    with torch.serialization.safe_globals([Own]):
        found = make_reader(store).newest_valid()
    assert found is not None and found.step == 2


def test_weights_are_taken_from_a_checkpoint_whose_values_are_not_needed(store: CheckpointStore) -> None:
    save(store, 1)
    tamper(store.folder(1), "shared", {"mine": Own()})
    assert make_reader(store).open(store.look(store.folder(1))).step == 1


def test_refused_values_are_fetched_anew_and_a_copy_with_the_same_is_marked(
    store: CheckpointStore, tmp_path: Path
) -> None:
    place = tmp_path / "remote"
    tier = make_tier(place, store)
    for step in (1, 2):
        assert save_remotely(tier, step).committed
    tamper(store.folder(2), "shared", {"step": Attack(tmp_path / "ran")})
    assert_resumes(tier := make_tier(place, store, attempt=2), 2)
    assert len(tier.repaired) == 1
    tamper(place / "a-run" / store.folder(2).name, "shared", {"step": Attack(tmp_path / "ran")})
    elsewhere = CheckpointStore(tmp_path / "another-host" / "checkpoints")
    assert_resumes(make_tier(place, elsewhere, attempt=3), 1)
    assert REFUSED in (place / "a-run" / store.folder(2).name / MARK).read_text()
    assert not (tmp_path / "ran").exists()
