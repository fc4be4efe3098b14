"""`ls`, `show`, `verify`, `gc`, `pin` and how all commands behave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from checkpoint_support import in_ranks, make_writer, save, small_state, snapshot
from remote_support import make_tier, save_remotely

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState
from framework.checkpoint.__main__ import COMMANDS, command_line, main
from framework.checkpoint.manifest import METADATA
from framework.distributed import Group, World
from framework.rundir import RunDirectory

Told = Callable[..., Any]


def run_of(store: CheckpointStore) -> Path:
    return store.path.parent


def configure(store: CheckpointStore, **options: Any) -> None:
    run_of(store).mkdir(parents=True, exist_ok=True)
    config = {"run": {"name": "a-run"}, "callbacks": {"async_checkpoint": options}}
    (run_of(store) / "config.yaml").write_text(yaml.safe_dump(config))


def flip(path: Path, at: int = 1000) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shard(store: CheckpointStore, step: int) -> Path:
    (found,) = store.folder(step).glob("__0_0.*")
    return found


def test_ls_tells_everything_of_local_remote_and_damaged_ones(
    store: CheckpointStore, tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(store, remote=str(tmp_path / "remote"))
    tier = make_tier(tmp_path / "remote", store)
    for step in (1, 2, 3):
        assert "both" in {row["tier"] for row in told("ls", run_of(store))} or step == 1
        header = SaveHeader(step, metrics={"top1": step / 10, "odd": float("nan")}, reason="final", health="good")
        assert save_remotely(tier, step, header).committed
    shutil.rmtree(store.folder(1))
    save(store, 4)
    lost = shard(store, 3)
    lost.unlink()
    (tmp_path / "remote/a-run" / store.folder(2).name / shard(store, 2).name).unlink()
    rows = told("ls", run_of(store), code=1)
    assert [(row["step"], row["tier"]) for row in rows] == [(4, "local"), (3, "remote"), (2, "local"), (1, "remote")]
    assert rows[1]["metrics"] == {"top1": 0.3, "odd": "nan"} and rows[1]["health"] == "good"
    assert rows[1]["damage"] == f"{lost.name} is missing"
    assert rows[2]["damage"] == f"remote: {shard(store, 2).name} is missing" and rows[3]["damage"] is None
    assert main(["ls", str(run_of(store)), "--step", "3"]) == 1
    shown = capsys.readouterr().out
    assert "top1 0.3" in shown and "remote" in shown and "good" in shown and "final" in shown
    assert [row["step"] for row in told("ls", tmp_path / "remote/a-run", code=1)] == [3, 2, 1]


def test_ls_lists_the_local_ones_and_says_so_where_the_remote_place_cannot_be_read(
    store: CheckpointStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(store, 1)
    configure(store, remote=str(tmp_path / "not-mounted"))
    assert main(["ls", str(run_of(store)), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["step"] for row in json.loads(out)] == [1]
    assert "only local checkpoints are listed" in err and "not-mounted" in err


def test_ls_lists_what_was_set_aside_with_its_reason(store: CheckpointStore, told: Told) -> None:
    for step in (1, 2):
        save(store, step)
    store.set_aside(store.list()[0], "bytes of it are wrong")
    rows = told("ls", run_of(store))
    assert [(row["step"], row["tier"], row["damage"]) for row in rows] == [
        (1, "local", None),
        (2, "set aside", "bytes of it are wrong"),
    ]


def test_a_folder_of_checkpoints_on_this_host_is_no_remote_place(
    store: CheckpointStore, tmp_path: Path, told: Told
) -> None:
    save(store, 1)
    shutil.copytree(store.path, tmp_path / "kept")
    assert [(row["step"], row["tier"], row["damage"]) for row in told("ls", tmp_path / "kept")] == [(1, "local", None)]


def test_a_run_without_checkpoints_says_so_and_no_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    assert main(["ls", str(run)]) == main(["verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.count("has no published checkpoint") == 2 and "If it is itself one, `show` and `verify` take it" in out
    for command in ("ls", "show", "verify", "gc"):
        assert main([command, str(tmp_path)]) == 1
        assert f"{tmp_path} is no run" in capsys.readouterr().err


def tied_state(step: int) -> TrainState:
    weight = torch.arange(24.0).reshape(6, 4) + step
    model = {"emb.weight": weight, "norm.bias": torch.ones(4), "head.weight": weight}
    return TrainState({"model": model, "optimizer": {"m": torch.zeros(3)}}, {"step": step, "names": ["a"]}, {"rng": 1})


def write(store: CheckpointStore, state: TrainState, step: int) -> Path:
    writer = make_writer(store)
    writer.start(state, SaveHeader(step, metrics={"loss": 0.5}))
    (result,) = writer.wait(30)
    writer.close()
    assert result.committed, result.error
    return result.path


def test_show_tells_keys_shapes_dtypes_ties_values_and_header(
    store: CheckpointStore, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    write(store, tied_state(7), 7)
    found = told("show", f"{run_of(store)}@7")
    by_key = {one["key"]: one for one in found["tensors"]}
    assert by_key["model.emb.weight"]["shape"] == [6, 4] and by_key["model.emb.weight"]["dtype"] == "float32"
    assert by_key["model.head.weight"]["tied_to"] == "model.emb.weight"
    assert by_key["model.emb.weight"]["path"] == ["model", "emb.weight"]
    assert found["parts"] == {"model": {"tensors": 3, "bytes": 112}, "optimizer": {"tensors": 1, "bytes": 12}}
    assert found["header"]["step"] == 7 and found["header"]["metrics"] == {"loss": 0.5}
    assert {(one["part"], one["name"], one["text"]) for one in found["values"]} >= {
        ("shared", "step", "7"),
        ("rank 0", "rng", "1"),
    }
    assert main(["show", str(run_of(store))]) == 0
    shown = capsys.readouterr().out
    assert "  head.weight  float32 [6, 4]  tied to model.emb.weight" in shown
    assert "  emb.weight  float32 [6, 4]  96 bytes  rank 0\n" in shown


def test_show_lists_keys_in_the_order_of_the_model(store: CheckpointStore, told: Told) -> None:
    model = {f"layers.{number}.weight": torch.ones(number) for number in (10, 9, 2)}
    write(store, TrainState({"optimizer": {"m": torch.ones(99)}, "model": model}), 1)
    keys = [one["key"] for one in told("show", run_of(store))["tensors"]]
    assert keys == ["model.layers.2.weight", "model.layers.9.weight", "model.layers.10.weight", "optimizer.m"]


def save_as(world: World, path: Path) -> None:
    group = Group(world, timeout_seconds=20, name="checkpoint")
    writer = make_writer(CheckpointStore(path), world=world, group=group)
    writer.start(small_state(1), SaveHeader(1))
    (result,) = writer.wait(30)
    writer.close()
    assert result.committed, result.error


def test_show_tells_which_rank_wrote_which_rows(store: CheckpointStore, told: Told) -> None:
    in_ranks(2, save_as, store.path)
    found = told("show", run_of(store))
    ranks = {chunk["rank"] for one in found["tensors"] for chunk in one["chunks"]}
    assert ranks == {0, 1}
    for one in found["tensors"]:
        rows = sum(chunk["sizes"][0] if chunk["sizes"] else 1 for chunk in one["chunks"])
        assert rows == (one["shape"][0] if one["shape"] else 1)


def test_show_and_verify_read_what_torch_itself_wrote(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stock"
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"w": torch.ones(3, 2)}, "lr": 0.1}, checkpoint_id=str(folder), no_dist=True)
    found = told("show", folder)
    assert found["kind"] == "stock" and found["header"] is None
    assert [(one["key"], one["shape"]) for one in found["tensors"]] == [("model.w", [3, 2])]
    assert [(one["part"], one["text"]) for one in found["values"]] == [("lr", "0.1")]
    assert main(["verify", str(folder), "--full"]) == 0
    assert "no checksums" in capsys.readouterr().out
    (file,) = folder.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 100)
    assert main(["verify", str(folder)]) == 1
    assert file.name in capsys.readouterr().out


def test_verify_is_cheap_and_names_the_damaged_file_when_full(
    store: CheckpointStore, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(store, step)
    flip(shard(store, 2))
    before = snapshot(store.path)
    assert [row["damage"] for row in told("verify", run_of(store))] == [None, None]
    rows = told("verify", run_of(store), "--full", code=1)
    assert f"{shard(store, 2).name} is damaged" in rows[0]["damage"] and rows[1]["damage"] is None
    assert snapshot(store.path) == before
    assert rows[1]["checked_bytes"] == store.list()[1].manifest.size
    os.truncate(shard(store, 1), 100)
    assert main(["verify", f"{run_of(store)}@1"]) == 1
    shown = capsys.readouterr().out
    assert shard(store, 1).name in shown and "has 100 bytes" in shown


def test_gc_lists_and_removes_only_when_told(store: CheckpointStore, told: Told) -> None:
    configure(store, keep={"last": 1, "every": 4})
    for step in (1, 2, 4, 5, 6):
        save(store, step)
    store.pin(2)
    left = store.folder(9) / "__0_0.000001-0badcafe-000001.distcp"
    left.parent.mkdir()
    left.write_bytes(b"x" * 100)
    before = snapshot(store.path)
    found = told("gc", run_of(store))
    assert snapshot(store.path) == before and not found["removed"]
    assert {Path(one["path"]) for one in found["items"]} == {store.folder(1), store.folder(5), left}
    assert all(one["bytes"] > 0 and one["why"] for one in found["items"])
    removed = told("gc", run_of(store), "--yes")
    assert removed["items"] == found["items"] and removed["failed"] == []
    assert [one.step for one in store.list()] == [6, 4, 2] and not left.exists()
    assert told("gc", run_of(store), "--yes")["items"] == []
    assert [one["path"] for one in told("gc", run_of(store), "--keep", "1")["items"]] == [str(store.folder(4))]


def test_gc_leaves_a_live_run_alone(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(store, step)
    lease = RunDirectory(run_of(store)).acquire()
    try:
        before = snapshot(store.path)
        assert main(["gc", str(run_of(store)), "--keep", "1", "--yes"]) == 1
        assert "belongs to a live run" in capsys.readouterr().err
        assert snapshot(store.path) == before
    finally:
        lease.release()
    assert main(["gc", str(run_of(store)), "--keep", "1", "--yes"]) == 0
    assert [one.step for one in store.list()] == [2]


def test_gc_leaves_local_copies_of_a_run_with_a_remote_place_to_the_run(
    store: CheckpointStore, tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(store, keep=1, remote=str(tmp_path))
    for step in (1, 2):
        save(store, step)
    assert told("gc", run_of(store), "--yes")["items"] == []
    assert main(["gc", str(run_of(store)), "--keep", "1"]) == 1
    assert "Leave --keep out" in capsys.readouterr().err
    assert [one.step for one in store.list()] == [2, 1]


def test_pin_keeps_and_unpin_gives_up(store: CheckpointStore, told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(store, step)
    run = run_of(store)
    assert told("pin", run, "--step", "1") == {"step": 1, "pinned": True}
    assert [row["pinned"] for row in told("ls", run)] == [False, True]
    assert told("gc", run, "--keep", "1", "--yes")["items"] == []
    assert told("unpin", f"{run}@1")["was_pinned"] is True
    assert told("unpin", f"{run}@1")["was_pinned"] is False
    assert main(["pin", str(run), "--step", "7"]) == 1
    assert "no checkpoint of step 7. There are: 2, 1." in capsys.readouterr().err
    assert main(["pin", str(run)]) == 1
    assert "Give --step N" in capsys.readouterr().err


def test_the_newest_one_is_never_taken_silently_when_it_is_damaged(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(store, step)
    shard(store, 2).unlink()
    assert main(["show", str(run_of(store))]) == 1
    assert "The newest whole one: --step 1" in capsys.readouterr().err
    (store.folder(1) / METADATA).unlink()
    assert main(["show", f"{run_of(store)}@1"]) == 1
    assert "no checkpoint of step 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "Exit code" in shown and "--json" in shown


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_shows_examples_that_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    _, shown = capsys.readouterr().out.split("\nexamples:\n")
    start = "  python -m framework.checkpoint "
    assert shown.strip() and all(line.startswith(f"{start}{name} ") for line in shown.splitlines())
    for line in shown.splitlines():
        assert command_line().parse_args(line.removeprefix(start).split()).command == name


@pytest.mark.cold
def test_a_closed_pipe_ends_a_command_quietly(store: CheckpointStore) -> None:
    tensors = {"model": {f"layer{n}.with.a.long.name.so.that.the.pipe.fills": torch.ones(1) for n in range(4000)}}
    write(store, TrainState(tensors), 1)
    command = [sys.executable, "-m", "framework.checkpoint", "show", str(run_of(store))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0 and errors == ""


@pytest.mark.cold
def test_ctrl_c_ends_a_command_with_one_word(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        "import sys; from framework.checkpoint.__main__ import main; from framework.checkpoint.commands import ls\n"
        f"ls.run = lambda arguments: open({str(pipe)!r}).read()\n"
        f"sys.exit(main(['ls', {str(run_of(store))!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        writer = os.open(pipe, os.O_WRONLY)  # returns once the command reads
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        os.close(writer)
        assert process.stderr is not None and process.stderr.read() == b"interrupted\n"


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if verb not in ("diff", "copy", "export")])
def test_an_empty_argument_is_not_the_current_folder(
    store: CheckpointStore, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(store, 1)
    monkeypatch.chdir(run_of(store))
    step = ["--step", "1"] if verb in ("pin", "unpin") else []
    with pytest.raises(SystemExit, match="2"):
        main([verb, "", *step])
    assert f"{verb}: an argument is empty (run)" in capsys.readouterr().err
