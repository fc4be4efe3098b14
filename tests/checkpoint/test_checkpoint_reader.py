"""What cannot be read is not taken for damage, what does not belong together is not loaded, and files tell the truth."""

from __future__ import annotations

import errno
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import (
    assert_holds,
    blank,
    in_ranks,
    leaves,
    make_reader,
    make_writer,
    save,
    small_state,
    snapshot,
)
from support.faultfs import FaultFS

from framework.checkpoint import CheckpointReader, CheckpointStore, SaveHeader, TrainState, files, fill
from framework.checkpoint.files import DamagedError, FileRecord, UnreadableError
from framework.checkpoint.manifest import METADATA, seal, unseal
from framework.checkpoint.verify import check_cover, check_structure
from framework.distributed import Group, World
from framework.errors import CheckpointError, StateMismatchError


def save_tensors(store: CheckpointStore, tensors: Any, step: int = 1) -> None:
    writer = make_writer(store)
    writer.start(TrainState(tensors), SaveHeader(step))
    (result,) = writer.wait(30)
    writer.close()
    assert result.committed, result.error


def load(store: CheckpointStore, tensors: Any) -> Any:
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, tensors)
    return tensors


def test_what_cannot_be_read_is_passed_over_stays_where_it_is_and_is_used_again(faultfs: FaultFS) -> None:
    store = CheckpointStore(faultfs.path / "checkpoints")
    save(store, 1)
    save(store, 2)
    before = snapshot(store.path)
    faultfs.fail("read", match="*/step_0000000002/__0_0*")
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    (rejected,) = reader.rejected
    assert rejected.path == store.folder(2) and rejected.moved_to is None
    assert "__0_0" in rejected.reason and os.strerror(errno.EIO) in rejected.reason
    faultfs.heal()
    assert snapshot(store.path) == before
    assert_holds(store, 2)


@pytest.mark.parametrize("operation", ["read", "open"])
def test_a_volume_of_which_nothing_can_be_read_is_an_error_not_an_empty_one(faultfs: FaultFS, operation: str) -> None:
    store = CheckpointStore(faultfs.path / "checkpoints")
    save(store, 1)
    before = snapshot(store.path)
    faultfs.fail(operation, error=errno.EACCES, match="*/step_*/*")
    with pytest.raises(CheckpointError, match=r"step_0000000001: .*Permission denied"):
        make_reader(store).newest_valid()
    faultfs.heal()
    faultfs.fail("readdir", match="*checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints"):
        make_reader(store).newest_valid()
    faultfs.heal()
    assert snapshot(store.path) == before


def looking(world: World, path: Path) -> tuple[int, list[tuple[str, Any, str]]]:
    reader = CheckpointReader(CheckpointStore(path), world, Group(world, timeout_seconds=20, name="checkpoint"))
    found = reader.newest_valid()
    assert found is not None
    return found.step, [(item.path.name, item.moved_to, item.reason) for item in reader.rejected]


def test_what_one_rank_cannot_read_no_rank_uses(faultfs: FaultFS) -> None:
    store = CheckpointStore(faultfs.path / "checkpoints")
    save(store, 1)
    save(store, 2)
    faultfs.fail("read", match="*/step_0000000002/__0_0*", count=1)  # one piece, read by one rank
    first, second = in_ranks(2, looking, store.path)
    assert first == second
    step, ((name, moved, reason),) = first
    assert (step, name, moved) == (1, store.folder(2).name, None)
    assert reason.startswith(("rank 0: __0_0", "rank 1: __0_0"))
    assert [answer[0] for answer in in_ranks(2, looking, store.path)] == [2, 2]


def looking_in_vain(world: World, path: Path) -> str:
    reader = CheckpointReader(CheckpointStore(path), world, Group(world, timeout_seconds=20, name="checkpoint"))
    if world.rank == 1:

        def vanish(folder: Path) -> Any:
            raise CheckpointError(f"{folder} is out of reach")

        reader.store.look = vanish  # type: ignore[method-assign]
    try:
        reader.newest_valid()
    except CheckpointError as error:
        return str(error)
    return "found"


def test_what_no_other_checkpoint_helps_against_ends_all_ranks_at_once(store: CheckpointStore) -> None:
    save(store, 1)
    before = snapshot(store.path)
    first, second = in_ranks(2, looking_in_vain, store.path)
    assert first == second and first.startswith("rank 1: ") and str(store.folder(1)) in first
    assert snapshot(store.path) == before


def test_ties_are_loaded_only_from_equal_bytes(store: CheckpointStore) -> None:
    one, other = torch.randn(20, 10), torch.randn(20, 10)
    save_tensors(store, {"embed": one, "head": one}, 1)
    save_tensors(store, {"embed": one, "head": one.clone()}, 2)
    save_tensors(store, {"embed": one, "head": other}, 3)
    reader = make_reader(store)
    tied = torch.zeros(20, 10)
    for step in (1, 2):
        tied.zero_()
        reader.load(reader.open(store.look(store.folder(step))), {"embed": tied, "head": tied})
        assert torch.equal(tied, one)
    tied.zero_()
    with pytest.raises(StateMismatchError, match="'embed' and 'head' are one tensor in this run"):
        reader.load(reader.open(store.look(store.folder(3))), {"embed": tied, "head": tied})
    assert not tied.any()


def test_a_record_must_cover_every_tensor(store: CheckpointStore) -> None:
    save_tensors(store, {"w": torch.ones(4, 6)})
    _, record = check_structure(store.folder(1), 1)
    entry: Any = record.state_dict_metadata["w"]
    for size, message in (
        (torch.Size([5, 6]), "24 of the 30 elements of 'w'"),
        (torch.Size([3, 6]), "outside of its"),
        (torch.Size([24]), "outside of its"),
    ):
        entry.size = size
        with pytest.raises(DamagedError, match=message):
            check_cover(record)
    entry.size = torch.Size([5, 6])
    (store.folder(1) / METADATA).write_bytes(reseal(store.folder(1), pickle.dumps(record)))
    with pytest.raises(CheckpointError, match="24 of the 30 elements of 'w'"):
        make_reader(store).newest_valid()


def reseal(folder: Path, pickled: bytes) -> bytes:
    _, before = unseal((folder / METADATA).read_bytes())
    return seal(pickled, before.manifest, (folder / before.manifest).read_bytes())


def many() -> dict[str, torch.Tensor]:
    """Small tensors that are read together, one that is read in pieces, and some that are neither."""
    generator = torch.Generator().manual_seed(5)
    tensors = {f"small{n}": torch.randn(n % 7, 5, generator=generator) for n in range(600)}
    tensors["large"] = torch.randn(1000, 700, generator=generator)
    tensors["scalar"] = torch.tensor(3)
    return tensors


def test_runs_and_pieces_of_any_size_give_the_same_bits(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = many()
    save_tensors(store, tensors)
    for run_bytes, run_items, gap in ((16 << 20, 256, 16 << 10), (100_000, 3, 0), (2_000, 1000, 1 << 20)):
        monkeypatch.setattr(fill, "RUN_BYTES", run_bytes)
        monkeypatch.setattr(fill, "RUN_ITEMS", run_items)
        monkeypatch.setattr(fill, "GAP_BYTES", gap)
        loaded = load(store, blank(tensors))
        assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)


def test_the_way_to_other_devices_gives_the_same_bits(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = many()
    save_tensors(store, tensors)
    monkeypatch.setattr(fill, "_is_host", lambda tensor: False)  # no other device is needed to go that way
    loaded = load(store, blank(tensors))
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize(
    ("shape", "offsets", "lengths", "first"),
    [
        ((4, 6), (0, 0), (4, 6), 0),
        ((4, 6), (1, 0), (2, 6), 6),
        ((4, 6), (1, 2), (1, 3), 8),
        ((4, 6), (0, 2), (2, 3), None),
        ((4, 6), (0, 2), (4, 1), None),
        ((3, 4, 5), (2, 1, 0), (1, 2, 5), 45),
        ((3, 4, 5), (1, 0, 0), (2, 4, 5), 20),
        ((3, 4, 5), (0, 1, 0), (2, 2, 5), None),
        ((1, 6), (0, 2), (1, 3), 2),
        ((), (), (), 0),
    ],
)
def test_a_part_is_read_straight_only_where_it_is_contiguous(
    shape: Any, offsets: Any, lengths: Any, first: int | None
) -> None:
    assert fill._first_element(shape, offsets, lengths) == first
    if first is not None:
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        part = fill._narrow(whole, offsets, lengths)
        assert part.is_contiguous() and int(part.reshape(-1)[0]) == first


def test_a_file_is_written_whole_by_short_writes_and_where_no_space_can_be_reserved(faultfs: FaultFS) -> None:
    data = os.urandom(300_000)
    faultfs.short(100_000)
    faultfs.fail("fallocate", error=errno.EOPNOTSUPP)
    path = faultfs.path / "file"
    assert files.create(path, data) == FileRecord(len(data), (zlib.crc32(data),))
    assert path.read_bytes() == data


def test_a_file_system_that_takes_nothing_is_an_error_not_an_endless_loop(faultfs: FaultFS) -> None:
    faultfs.short(0)
    with pytest.raises(CheckpointError, match="file could not be written: "):
        files.create(faultfs.path / "file", b"bytes")


@pytest.mark.parametrize(
    ("operation", "error", "message"),
    [
        ("fsync", errno.EIO, "could not be forced to disk: Input/output error"),
        ("write", errno.EIO, "could not be written: Input/output error"),
        ("fallocate", errno.ENOSPC, "could not be written: No space left on device"),
        ("create", errno.EROFS, "could not be written: Read-only file system"),
    ],
)
def test_a_file_that_could_not_be_written_is_named_and_gone(
    faultfs: FaultFS, operation: str, error: int, message: str
) -> None:
    faultfs.fail(operation, error=error)
    path = faultfs.path / "file"
    with pytest.raises(CheckpointError, match=f"{path} {message}"):
        files.create(path, b"bytes")
    faultfs.heal()
    assert not path.exists()
    files.create(path, b"bytes")
    faultfs.fail("fsyncdir")
    with pytest.raises(OSError, match=f"could not be forced to disk: .*{faultfs.path}"):
        files.sync_folder(faultfs.path)


def test_a_file_that_is_there_is_neither_written_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="could not be written: File exists"):
        files.create(path, b"new")
    assert path.read_bytes() == b"precious"


def test_checksums_are_those_of_zlib_in_pieces_of_any_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 70_000)
    monkeypatch.setattr(files, "WRITE_BYTES", 30_000)
    monkeypatch.setattr(files, "CHECK_BYTES", 9_000)
    data = os.urandom(200_001)
    record = files.create(tmp_path / "file", memoryview(data))
    assert record.crc32 == tuple(zlib.crc32(data[at : at + 70_000]) for at in range(0, len(data), 70_000))
    assert files.sums_of(data) == record.crc32
    for piece in range(3):
        files.check_piece(tmp_path / "file", record, piece)
    wrong = FileRecord(record.size, (*record.crc32[:2], record.crc32[2] ^ 1))
    with pytest.raises(DamagedError, match=r"file is damaged between bytes 140,000 and 200,001"):
        files.check_piece(tmp_path / "file", wrong, 2)


def test_many_buffers_are_filled_by_short_reads(tmp_path: Path) -> None:
    data = os.urandom(5_000)
    (tmp_path / "file").write_bytes(data)
    buffers = [memoryview(bytearray(size)) for size in (1, 2, 3) * 800]  # more than one call takes
    wanted = sum(len(buffer) for buffer in buffers)
    with files.opened(tmp_path / "file") as fd:
        files.read_into(fd, buffers, 17, "file")
        assert b"".join(buffers) == data[17 : 17 + wanted]
        with pytest.raises(DamagedError, match="file ends at byte 5000"):
            files.read_into(fd, [memoryview(bytearray(100))], 4_950, "file")


def test_a_file_that_cannot_be_opened_is_unreadable_and_a_missing_one_is_damage(faultfs: FaultFS) -> None:
    path = faultfs.path / "file"
    with pytest.raises(DamagedError, match="file is missing") as raised:
        files.read(path)
    assert not isinstance(raised.value, UnreadableError)
    path.write_bytes(b"x")
    faultfs.fail("open", error=errno.EACCES)
    with pytest.raises(UnreadableError, match="file cannot be opened: Permission denied"):
        files.read(path)


def test_nothing_is_read_of_a_state_that_does_not_fit(store: CheckpointStore) -> None:
    save(store, 1)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    for shard in store.folder(1).glob("*.distcp"):
        shard.unlink()  # so that reading would fail otherwise
    live = blank(small_state(1).tensors)
    live["model"]["fc.bias"] = torch.zeros(31)
    with pytest.raises(StateMismatchError):
        reader.load(found, live)
    assert not any(tensor.any() for tensor in leaves(live))
