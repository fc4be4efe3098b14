"""A snapshot holds the values of its safe point, whoever changes them when."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from checkpoint_support import SOLO, make_reader, make_writer, solo_group
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState
from framework.checkpoint.plan import Flat, Plan, agree, describe
from framework.checkpoint.snapshot import AUTO, OFF, ON, Snapshots, has_spare_core
from framework.checkpoint.staging import PIECE_BYTES, Copying, cut
from framework.distributed import World
from framework.errors import CheckpointError


class Taken:
    """Snapshots of one state, without a thread: whatever is copied late is copied by the fence."""

    def __init__(self, tensors: Mapping[str, Tensor], settled: set[str], overlap: str = ON) -> None:
        self.tensors, self.settled = tensors, frozenset(settled)
        self.snapshots = Snapshots(SOLO, overlap)
        self.flat: Flat = describe(tensors)
        self.plan: Plan = agree(self.flat, solo_group())

    def build(self) -> None:
        self.snapshots.build(self.flat, self.plan.layouts[0], self.settled, pinned=False)

    def proven(self) -> Taken:
        """After a rehearsal, as after the first step of a run."""
        self.build()
        self.snapshots.rehearse()
        self.snapshots.fence(before_update=True)
        return self

    def values(self) -> dict[str, Tensor]:
        return {entry.key: target.clone() for entry, target in self.snapshots.image.targets}


def trained() -> tuple[nn.Linear, torch.optim.Adam, dict[str, Tensor], set[str]]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{item}": value for item, value in optimizer.state[parameter].items()}
    return model, optimizer, tensors, set(tensors)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in tensors.items()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_an_update_waits_for_what_is_not_copied_yet() -> None:
    model, optimizer, tensors, settled = trained()
    taken = Taken(tensors, settled).proven()
    before = copied(tensors)
    snapshot = taken.snapshots.take()
    step(model, optimizer)
    snapshot.finish()
    assert same(taken.values(), before) and not same(before, tensors)


def test_what_is_settled_is_not_copied_at_once() -> None:
    _, _, tensors, settled = trained()
    taken = Taken(tensors, settled).proven()
    with torch.no_grad():
        for value in tensors.values():
            value += 1
    before = taken.values()
    snapshot = taken.snapshots.take()
    assert same(taken.values(), before)  # the old bytes: nobody has copied yet
    snapshot.finish()
    assert same(taken.values(), tensors)


def test_an_optimizer_that_steps_inside_of_backward_waits_too() -> None:
    model = nn.Linear(4, 3)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    tensors = dict(model.named_parameters())
    taken = Taken(tensors, set(tensors)).proven()
    before = copied(tensors)
    snapshot = taken.snapshots.take()
    model(torch.ones(2, 4)).square().sum().backward()
    snapshot.finish()
    assert same(taken.values(), before) and not same(before, tensors)


def test_what_is_not_settled_is_copied_at_once() -> None:
    tensors = {"weight": torch.ones(3), "mean": torch.ones(3)}
    taken = Taken(tensors, {"weight"}).proven()
    snapshot = taken.snapshots.take()
    tensors["mean"].fill_(7)
    snapshot.finish()
    assert taken.values()["mean"].tolist() == [1, 1, 1]


def test_a_weight_that_shares_its_memory_with_a_buffer_is_copied_at_once() -> None:
    shared = torch.ones(3)
    taken = Taken({"weight": shared, "buffer": shared.view(3)}, {"weight"}).proven()
    snapshot = taken.snapshots.take()
    shared.fill_(7)
    snapshot.finish()
    assert taken.values()["weight"].tolist() == [1, 1, 1]


def test_an_early_change_is_no_snapshot_and_the_next_one_is_right(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    taken = Taken(tensors, {"a", "b"}).proven()
    snapshot = taken.snapshots.take()
    tensors["b"].mul_(5)
    taken.snapshots.fence()
    with pytest.raises(CheckpointError, match="b changed before the update"):
        snapshot.finish()
    assert "b changes between updates" in caplog.text
    taken.build()
    snapshot = taken.snapshots.take()
    tensors["b"].mul_(5)
    taken.snapshots.fence()
    snapshot.finish()
    assert taken.values()["b"].tolist() == [5, 5, 5]


def test_a_change_that_torch_does_not_count_is_found_by_the_rehearsal(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"a": torch.ones(3), "hidden": torch.ones(3)}
    taken = Taken(tensors, {"a", "hidden"})
    taken.build()
    taken.snapshots.rehearse()
    tensors["hidden"].data.mul_(2)  # as a forward that normalises its weights would
    taken.snapshots.fence(before_update=True)
    assert "hidden changes between updates in a way that torch does not count" in caplog.text
    taken.build()
    snapshot = taken.snapshots.take()
    tensors["hidden"].data.mul_(2)
    taken.snapshots.fence()
    snapshot.finish()
    assert taken.values()["hidden"].tolist() == [2, 2, 2]


def test_a_counted_change_in_the_rehearsal_concerns_its_tensor_alone() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    taken = Taken(tensors, {"a", "b"})
    taken.build()
    taken.snapshots.rehearse()
    tensors["b"].mul_(2)
    taken.snapshots.fence(before_update=True)
    taken.build()
    assert taken.snapshots.is_overlapped and list(taken.snapshots._watched) == ["a"]


def test_a_save_before_any_update_is_a_rehearsal_itself() -> None:
    tensors = {"hidden": torch.ones(3)}
    taken = Taken(tensors, {"hidden"})
    taken.build()
    taken.snapshots.rehearse()
    taken.snapshots.fence()  # as an evaluation does
    snapshot = taken.snapshots.take()
    tensors["hidden"].data.mul_(2)
    taken.snapshots.fence(before_update=True)
    snapshot.finish()
    assert taken.values()["hidden"].tolist() == [1, 1, 1]
    taken.build()
    snapshot = taken.snapshots.take()
    tensors["hidden"].data.mul_(2)
    snapshot.finish()
    assert taken.values()["hidden"].tolist() == [2, 2, 2]


def test_a_change_that_torch_does_not_count_and_that_begins_late_is_found_by_samples() -> None:
    tensors = {f"w{number}": torch.ones(1000) for number in range(100)}
    taken = Taken(tensors, set(tensors)).proven()
    taken.snapshots.take().finish()
    snapshot = taken.snapshots.take()
    for tensor in tensors.values():
        tensor.data.mul_(2)
    taken.snapshots.fence(before_update=True)
    with pytest.raises(CheckpointError, match="changed before the update"):
        snapshot.finish()
    assert not taken.snapshots.is_overlapped  # those that were not sampled change too
    taken.build()
    snapshot = taken.snapshots.take()
    for tensor in tensors.values():
        tensor.data.mul_(2)
    snapshot.finish()
    assert all(value.tolist() == [2.0] * 1000 for value in taken.values().values())


def test_a_weight_within_the_memory_of_a_buffer_is_copied_at_once() -> None:
    base = torch.ones(4, 3)
    taken = Taken({"base": base, "row": base.data[2]}, {"base"}).proven()
    snapshot = taken.snapshots.take()
    base.data[2].add_(1)
    taken.snapshots.fence(before_update=True)
    snapshot.finish()
    assert torch.equal(taken.values()["base"], torch.ones(4, 3)) and taken.values()["row"].tolist() == [1, 1, 1]


def test_every_thread_that_updates_waits() -> None:
    """Optimizers may step in threads of backward, one for each device."""
    tensors = {"a": torch.ones(40 << 20)}
    taken = Taken(tensors, {"a"}).proven()
    snapshot = taken.snapshots.take()
    threads = [threading.Thread(target=taken.snapshots.fence, kwargs={"before_update": True}) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join(60)
    assert snapshot._copying.is_done
    threads[0].join(60)
    snapshot.finish()


def test_ctrl_c_while_it_waits_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    copying = Copying([([torch.zeros(3)], [torch.ones(3)])])
    monkeypatch.setattr("framework.checkpoint.staging.copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copying.finish()
    copying.finish()
    assert isinstance(copying.error, KeyboardInterrupt)


def test_without_overlap_everything_may_change_at_once() -> None:
    tensors = {"a": torch.ones(3)}
    taken = Taken(tensors, {"a"}, overlap=OFF).proven()
    snapshot = taken.snapshots.take()
    tensors["a"].fill_(7)
    snapshot.finish()
    assert taken.values()["a"].tolist() == [1, 1, 1]


def test_a_tensor_made_in_inference_mode_is_copied_at_once() -> None:
    with torch.inference_mode():
        tensors = {"a": torch.ones(3)}
    taken = Taken(tensors, {"a"}).proven()
    assert not taken.snapshots._watched
    taken.snapshots.take().finish()
    assert taken.values()["a"].tolist() == [1, 1, 1]


def test_the_hook_is_gone_with_the_memory() -> None:
    _, _, tensors, settled = trained()
    taken = Taken(tensors, settled).proven()
    before = len(_global_optimizer_pre_hooks)
    taken.snapshots.take()
    taken.snapshots.release()
    assert len(_global_optimizer_pre_hooks) == before - 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3 * PIECE_BYTES // 4 + 5),
        torch.randn(2000, 3000).t(),
        torch.randn(2100, 2200)[::2],
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.randn(33).to(torch.bfloat16),
        torch.tensor([True, False]),
    ],
    ids=["long", "transposed", "strided", "scalar", "empty", "bfloat16", "bool"],
)
def test_every_kind_of_tensor_is_copied_whole(tensor: Tensor) -> None:
    taken = Taken({"x": tensor, "y": torch.ones(2)}, {"x", "y"}).proven()
    for _, target in taken.snapshots.image.targets:
        target.zero_()
    taken.snapshots.take().finish()
    values = taken.values()
    assert torch.equal(values["y"], torch.ones(2))
    assert not tensor.numel() or torch.equal(values["x"], tensor)


def test_pieces_are_short_and_cover_everything() -> None:
    pairs = [(torch.zeros(n), torch.randn(n)) for n in (10, 5 * PIECE_BYTES // 4, 0, 77, 2 * PIECE_BYTES // 4)]
    pieces = cut(pairs)
    assert all(sum(target.nbytes for target in targets) <= 2 * PIECE_BYTES for targets, _ in pieces)
    Copying(pieces).finish()
    assert all(torch.equal(target, source) for target, source in pairs)


def test_a_copy_that_fails_is_a_failed_snapshot() -> None:
    broken = Copying([([torch.zeros(3)], [torch.zeros(4)])])
    broken.finish()
    assert broken.error is not None and broken.is_done


def test_overlap_is_automatic_where_a_core_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    two = World(0, 2, 0, 2, torch.device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert has_spare_core(two) and Snapshots(two, AUTO).is_overlapped
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not has_spare_core(two) and not Snapshots(two, AUTO).is_overlapped
    assert Snapshots(two, ON).is_overlapped and not Snapshots(World(0, 1, 0, 1, torch.device("cpu")), OFF).is_overlapped


def test_training_beside_overlapped_saves_saves_each_step_as_it_was(store: CheckpointStore) -> None:
    """The whole way, with the thread: every checkpoint equals the values at its own safe point."""
    torch.manual_seed(0)
    model = nn.Linear(300, 200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    writer = make_writer(store, overlap=ON)

    def advance() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 300)).square().sum().backward()
        writer.fence(before_update=True)
        optimizer.step()

    def state() -> TrainState:
        parameters = dict(model.named_parameters())
        moments = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
        keys = {f"model.{n}" for n in parameters} | {
            f"opt.{n}.{item}" for n, items in moments.items() for item in items
        }
        return TrainState({"model": parameters, "opt": moments}, settled=frozenset(keys))

    expected: dict[int, dict[str, Any]] = {}
    advance()
    writer.prepare(state())
    for number in range(2, 8):
        advance()
        expected[number] = copied(dict(model.named_parameters()))
        writer.start(state(), SaveHeader(step=number))
        advance()
        (result,) = writer.wait(30)
        assert result.committed, result.error
    writer.close()
    for found in store.list():
        live = {"model": {name: torch.zeros_like(value) for name, value in expected[found.step].items()}}
        reader = make_reader(store)
        reader.load(reader.open(found), live, partial=True)
        assert same(live["model"], expected[found.step])
    assert len(store.list()) == len(expected)


def test_a_forked_child_may_drop_the_memory_of_its_parent(store: CheckpointStore) -> None:
    """The memory is not in the child; giving it back there would unmap what lies at its address by then."""
    taken = Taken({"a": torch.ones(8 << 20)}, set()).proven()

    def child() -> None:
        import gc
        import mmap

        mine = [mmap.mmap(-1, 40 << 20) for _ in range(4)]
        taken.snapshots.release()
        taken.flat = taken.tensors = None  # type: ignore[assignment]
        gc.collect()
        for memory in mine:
            memory[:] = b"x" * len(memory)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
