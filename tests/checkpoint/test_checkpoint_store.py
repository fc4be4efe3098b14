"""Which checkpoints there are, and how they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_support import assert_holds, save, snapshot

from framework.checkpoint import CheckpointStore, SaveHeader
from framework.checkpoint.__main__ import main
from framework.checkpoint.manifest import METADATA, make_tag, shard_name
from framework.errors import CheckpointError


def steps(store: CheckpointStore) -> list[int]:
    return [found.step for found in store.list()]


def damage(store: CheckpointStore, step: int) -> None:
    (shard,) = store.folder(step).glob("__0_0.*")
    os.truncate(shard, 10)


def test_only_published_folders_are_listed_newest_first(store: CheckpointStore) -> None:
    assert store.list() == []
    for step in (9, 10, 1200):
        save(store, step)
    for name in ("step_0000000011", "step_12", "damaged", "step_00000000013", "other"):
        (store.path / name).mkdir()
    (store.path / "step_12" / METADATA).touch()
    (store.path / "step_00000000013" / METADATA).touch()
    (store.path / "step_0000000014").touch()
    assert steps(store) == [1200, 10, 9]
    assert store.folder(1200).name == "step_0000001200"


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot be read as a folder of checkpoints"):
        CheckpointStore(tmp_path / "checkpoints").list()


def test_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 6):
        save(store, step)
    assert sorted(store.retain(2)) == [store.folder(step) for step in (1, 2, 3)]
    assert steps(store) == [5, 4]
    assert sorted(os.listdir(store.path)) == [store.folder(4).name, store.folder(5).name]
    assert store.retain(2) == []
    assert_holds(store, 5)


def test_damaged_and_unfinished_checkpoints_do_not_count_as_kept_and_pinned_ones_stay(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2, header=SaveHeader(2, pinned=True))
    for step in (3, 4, 5, 6):
        save(store, step)
    damage(store, 5)
    store.folder(7).mkdir()
    assert store.retain(2) == [store.folder(3), store.folder(1)]
    assert steps(store) == [6, 5, 4, 2]
    with pytest.raises(ValueError, match="at least 1"):
        store.retain(0)


def test_nothing_is_deleted_while_the_newest_is_damaged(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    damage(store, 3)
    before = snapshot(store.path)
    assert store.retain(1) == []
    assert snapshot(store.path) == before
    save(store, 4)
    assert store.retain(1) == [store.folder(2), store.folder(1)]
    assert steps(store) == [4, 3]


def test_deleting_does_not_follow_links(store: CheckpointStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    for step in (1, 2, 3):
        save(store, step)
    (store.folder(1) / "folder").symlink_to(outside)
    (store.folder(1) / "file").symlink_to(outside / "precious")
    moved = tmp_path / "moved"
    os.rename(store.folder(2), moved)
    store.folder(2).symlink_to(moved)
    before = snapshot(moved)
    (store.path / ".trash-link").symlink_to(outside)
    store.retain(1)
    store.sweep(99)
    assert (outside / "precious").read_text() == "keep me"
    assert snapshot(moved) == before
    assert steps(store) == [3, 2]  # what lies elsewhere is read, but never deleted


def test_only_what_older_attempts_left_is_swept(store: CheckpointStore) -> None:
    save(store, 1, attempt=1)
    save(store, 2, attempt=3)
    damage(store, 2)
    kept = snapshot(store.path)
    for attempt in (2, 3, 4):
        for step in (1, 5):
            store.folder(step).mkdir(exist_ok=True)
            (store.folder(step) / shard_name(0, 0, make_tag(attempt, "t", 0))).write_bytes(b"part")
    old = make_tag(1, "t", 0)
    for name in (shard_name(0, 0, old), f".metadata.{old}.tmp", f"manifest.{old}.json"):
        (store.folder(2) / name).touch()  # in a damaged one: what it needs is not known
        store.folder(7).mkdir(exist_ok=True)
        (store.folder(7) / name).touch()
    (store.folder(5) / "notes.txt").write_text("mine")
    (store.path / ".trash-step_0000000000-ab").mkdir()
    (store.path / ".trash-step_0000000000-ab" / "part").touch()
    store.sweep(3)
    now = snapshot(store.path)
    assert kept.items() <= now.items()
    attempts = sorted(name for name in now if name.startswith(f"{store.folder(5).name}/__"))
    assert [name.split(".")[1][:6] for name in attempts] == ["000003", "000004"]
    assert not any(f"{store.folder(1).name}/__0_0.000002" in name for name in now)
    assert f"{store.folder(5).name}/notes.txt" in now
    assert not store.folder(7).exists() and not any(".trash" in name for name in now)
    assert (
        len([name for name in now if name.startswith(store.folder(2).name)]) == 6 + 3
    )  # the folder, what was in it, and what was put there


def test_a_run_can_be_moved(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    os.rename(store.path.parent, tmp_path / "elsewhere")
    assert_holds(CheckpointStore(tmp_path / "elsewhere" / "checkpoints"), 1)


def test_ls_and_verify_print_json_and_tell_damage(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(store.path.parent)
    for step in (1, 2):
        save(store, step, header=SaveHeader(step, position=8 * step, metrics={"top1": 0.5}))
    assert main(["ls", run, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["position"], row["metrics"]) for row in rows] == [
        (2, 16, {"top1": 0.5}),
        (1, 8, {"top1": 0.5}),
    ]
    assert rows[0]["path"] == "checkpoints/step_0000000002" and rows[0]["bytes"] > 0
    assert main(["verify", run, "--full"]) == 0
    assert "verified" in capsys.readouterr().out
    (shard,) = store.folder(2).glob("__0_0.*")
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    assert main(["ls", run]) == 0
    capsys.readouterr()
    before = snapshot(store.path)
    assert main(["verify", run, "--full", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert "checksum differs" in rows[0]["damage"] and shard.name in rows[0]["damage"] and rows[1]["damage"] is None
    assert main(["verify", run, "--full", "--step", "1"]) == 0
    assert snapshot(store.path) == before
    capsys.readouterr()
    assert main(["ls", run, "--step", "7"]) == 1
    assert "no checkpoint of step 7. There are: 2, 1." in capsys.readouterr().err
    assert main(["ls", run + "-not"]) == 1
    assert "has no folder 'checkpoints'" in capsys.readouterr().err


@pytest.mark.cold
def test_ls_loads_no_torch(store: CheckpointStore) -> None:
    save(store, 1)
    program = (
        "import sys; from framework.checkpoint.__main__ import main; "
        f"code = main(['ls', {str(store.path.parent)!r}]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Checkpoints of" in done.stdout
