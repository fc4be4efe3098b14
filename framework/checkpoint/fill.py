"""From the bytes of a checkpoint into the live tensors.

Guarantee: what lies in the file as this torch would write it is read straight into the memory of the tensor, by several
threads and with few calls; anything else goes through torch's own restricted reader. Any sharding is read into any
other.
"""

from __future__ import annotations

import io
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from framework.checkpoint import compat, files
from framework.checkpoint.compat import StorageInfo
from framework.checkpoint.files import DamagedError

Shape = tuple[int, ...]
RUN_BYTES = 16 << 20  # read by one call
RUN_ITEMS = 256
GAP_BYTES = 16 << 10  # reading over this costs less than another call
_scratch = threading.local()


@dataclass(frozen=True, slots=True)
class _Item:
    """A stored chunk, or a part of it, and the memory that it goes to.

    Args:
        place: Where the saved chunk lies.
        dtype: Its dtype.
        shape: Its shape.
        offsets: Where in the chunk the wanted part begins.
        target: The memory, in the shape of the wanted part.
    """

    place: StorageInfo
    dtype: torch.dtype
    shape: Shape
    offsets: Shape
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of a file that go into contiguous memory of a tensor.

    Args:
        begin: Where they begin in the file.
        size: How many.
        item: What they belong to.
        at: Where they begin in the memory of the target.
        prefix: What must stand right before them; none if that is another stretch.
    """

    begin: int
    size: int
    item: _Item
    at: int
    prefix: bytes


def fill(folder: Path, record: Metadata, tensors: Mapping[str, torch.Tensor], *, local_size: int = 1) -> None:
    """Reads every tensor, each in the shape and dtype it has in the checkpoint.

    Args:
        folder: The checkpoint; its bytes have been verified.
        record: torch's record of it.
        tensors: The live tensors by joined key, plain or DTensor, on any device.
        local_size: How many ranks of this host read at the same time.

    Raises:
        DamagedError: A file does not hold what the record says.
        UnreadableError: A file cannot be read.
    """
    stretches: dict[str, list[_Stretch]] = defaultdict(list)
    others: list[_Item] = []
    for item in _items(record, tensors):
        if pieces := _stretches(item):
            stretches[item.place.relative_path] += pieces
        else:
            others.append(item)
    runs = [(name, run) for name, found in stretches.items() for run in _runs(found)]
    with torch.no_grad(), ThreadPoolExecutor(files.num_threads(local_size)) as pool:
        try:
            for framed_otherwise in pool.map(lambda job: _read_run(folder / job[0], job[1]), runs):
                others += framed_otherwise  # after all runs, so that none of them writes over it
            for _ in pool.map(lambda item: _read_saved(folder, item), others):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _items(record: Metadata, tensors: Mapping[str, torch.Tensor]) -> Iterator[_Item]:
    """What to read: every chunk of a plain tensor; of a sharded one what torch's planner says."""
    sharded: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        if compat.is_distributed(tensor):
            sharded[key] = tensor
            continue
        entry = described(record, key)
        plain = tensor.detach()
        for chunk in entry.chunks:
            place = record.storage_data[MetadataIndex(key, chunk.offsets)]
            target = _narrow(plain, chunk.offsets, chunk.sizes)
            if target.numel():
                zeros = (0,) * len(chunk.sizes)
                yield _Item(place, entry.properties.dtype, tuple(chunk.sizes), zeros, target)
    if not sharded:
        return
    shapes = {
        MetadataIndex(key, chunk.offsets): tuple(chunk.sizes)
        for key in sharded
        for chunk in described(record, key).chunks
    }
    for item in create_default_local_load_plan(dict(sharded), record).items:
        index = item.storage_index
        target = compat.local_part(sharded[item.dest_index.fqn]).detach()
        target = _narrow(target, item.dest_offsets, item.lengths)
        if target.numel():
            dtype = described(record, index.fqn).properties.dtype
            yield _Item(record.storage_data[index], dtype, shapes[index], tuple(item.storage_offsets), target)


def torn(folder: Path, record: Metadata, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Whether tensors that share their memory have different bytes in the checkpoint: one would overwrite the other.

    Args:
        folder: The checkpoint; its bytes have been verified.
        record: torch's record of it.
        tensors: The live tensors by joined key; they are not touched.

    Returns:
        What differs, as a message; none if nothing does.

    Raises:
        DamagedError: A file does not hold what the record says, or cannot be read.
    """
    owners: dict[tuple[object, ...], str] = {}
    for key, tensor in tensors.items():
        part = compat.local_part(tensor)
        if not part.numel():
            continue
        views = (part.is_conj(), part.is_neg())
        owner = owners.setdefault((part.data_ptr(), part.shape, part.stride(), part.dtype, views), key)
        if owner == key or _places(record, owner) == _places(record, key):
            continue
        first, second = torch.empty_like(tensors[owner]), torch.empty_like(tensor)
        fill(folder, record, {owner: first})
        fill(folder, record, {key: second})
        if not torch.equal(_raw(first), _raw(second)):
            return (
                f"'{owner}' and '{key}' are one tensor in this run, but {folder} holds different values for them. "
                f"Nothing was loaded. Untie them, or use a checkpoint in which they are tied."
            )
    return None


def _places(record: Metadata, key: str) -> dict[Shape, tuple[str, int]]:
    found = {}
    for chunk in described(record, key).chunks:
        place = record.storage_data[MetadataIndex(key, chunk.offsets)]
        found[tuple(chunk.offsets)] = (place.relative_path, place.offset)
    return found


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return compat.local_part(tensor).detach().contiguous().reshape(-1).view(torch.uint8)


def described(record: Metadata, key: str) -> TensorStorageMetadata:
    """What the record says of a tensor."""
    entry = record.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _stretches(item: _Item) -> list[_Stretch]:
    """The bytes of an item, if they can be read without torch; else none."""
    place, target = item.place, item.target
    if target.dtype != item.dtype or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return []
    if math.prod(item.shape) * item.dtype.itemsize > place.length:
        return []
    frame = compat.framing(item.dtype, item.shape)
    first = 0 if target.shape == item.shape else _first_element(item.shape, item.offsets, tuple(target.shape))
    if frame.size != place.length or first is None:
        return []
    begin = place.offset + len(frame.prefix) + first * item.dtype.itemsize
    size = target.numel() * item.dtype.itemsize
    if first:  # an extra look at the prefix, which does not stand right before these bytes
        pieces = [_Stretch(place.offset + len(frame.prefix), 0, item, 0, frame.prefix)]
        prefix = b""
    else:
        pieces, prefix = [], frame.prefix
    for at in range(0, size, RUN_BYTES):
        pieces.append(_Stretch(begin + at, min(RUN_BYTES, size - at), item, at, prefix if at == 0 else b""))
    return pieces


def _first_element(shape: Shape, offsets: Shape, lengths: Shape) -> int | None:
    """Where a part of a contiguous tensor begins in it, counted in elements; none if it is not contiguous there."""
    first, stride = 0, 1
    is_whole = True  # all dimensions looked at so far are taken in full
    for size, offset, length in zip(reversed(shape), reversed(offsets), reversed(lengths), strict=True):
        if not is_whole and length != 1:
            return None
        is_whole = is_whole and length == size
        first += offset * stride
        stride *= size
    return first


def _runs(stretches: list[_Stretch]) -> Iterator[list[_Stretch]]:
    """Groups what lies close together in a file."""
    run: list[_Stretch] = []
    end = size = 0
    for stretch in sorted(stretches, key=lambda one: (one.begin, one.size)):
        begin = stretch.begin - len(stretch.prefix)
        is_near = 0 <= begin - end <= GAP_BYTES and size + stretch.size <= RUN_BYTES and len(run) < RUN_ITEMS
        if run and not is_near:
            yield run
            run, size = [], 0
        run.append(stretch)
        end = stretch.begin + stretch.size
        size += stretch.size
    if run:
        yield run


def _read_run(path: Path, run: list[_Stretch]) -> list[_Item]:
    """Reads neighbouring stretches by one call. Returns the items that are not framed as this torch frames them."""
    start = run[0].begin - len(run[0].prefix)
    payload = sum(stretch.size for stretch in run)
    between = memoryview(bytearray(run[-1].begin + run[-1].size - start - payload))
    buffers: list[memoryview] = []
    bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
    prefixes: list[tuple[memoryview, _Stretch]] = []
    end, used = start, 0
    bounce = 0
    for stretch in run:
        gap = stretch.begin - end
        if gap:
            buffers.append(between[used : used + gap])
            used += gap
            prefixes.append((between[used - len(stretch.prefix) : used], stretch))
        if stretch.size:
            target = stretch.item.target
            if _is_host(target):
                memory = compat.bytes_of(target)
                buffers.append(memory[stretch.at : stretch.at + stretch.size])
            else:
                part = _bounce(target.device)[bounce : bounce + stretch.size]
                bounce += stretch.size
                flat = target.reshape(-1).view(torch.uint8)
                bounced.append((flat[stretch.at : stretch.at + stretch.size], part))
                buffers.append(compat.bytes_of(part))
        end = stretch.begin + stretch.size
    with files.opened(path) as fd:
        files.read_into(fd, buffers, start, path.name)
    compat.copy_all([target for target, _ in bounced], [part for _, part in bounced])
    return [stretch.item for found, stretch in prefixes if found != stretch.prefix]


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _bounce(device: torch.device) -> torch.Tensor:
    """Memory of this thread, `[RUN_BYTES]` uint8, from which the device copies fast."""
    if not hasattr(_scratch, "bounce"):
        _scratch.bounce = torch.empty(RUN_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    bounce: torch.Tensor = _scratch.bounce
    return bounce


def _read_saved(folder: Path, item: _Item) -> None:
    """Lets torch read a saved chunk, without running code, and copies the wanted part of it."""
    place = item.place
    raw = bytearray(place.length)
    with files.opened(folder / place.relative_path) as fd:
        files.read_into(fd, [memoryview(raw)], place.offset, place.relative_path)
    try:
        chunk = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything here
        raise DamagedError(f"{place.relative_path} holds no tensor at byte {place.offset}: {error}") from error
    if not isinstance(chunk, torch.Tensor) or chunk.dtype != item.dtype or tuple(chunk.shape) != item.shape:
        kind = f"{item.dtype} {list(item.shape)}"
        raise DamagedError(f"{place.relative_path} does not hold a {kind} at byte {place.offset}")
    with torch.no_grad():  # each thread has its own
        _copy(item.target, _narrow(chunk, item.offsets, item.target.shape), place)


def _copy(target: torch.Tensor, source: torch.Tensor, place: StorageInfo) -> None:
    """Copies; where several values of the target share memory (it is expanded), those of the source must be equal."""
    shared = [
        dim for dim, (step, size) in enumerate(zip(target.stride(), target.shape, strict=True)) if step == 0 < size - 1
    ]
    if not shared:
        target.copy_(source)
        return
    first = source
    for dim in shared:
        first, target = first.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    if not torch.equal(_raw(first.expand_as(source)), _raw(source)):
        raise DamagedError(
            f"{place.relative_path} has different values at byte {place.offset} for a tensor that is expanded here, so "
            f"that they share memory; give it memory of its own, by clone()"
        )
    target.copy_(first)


def _narrow(tensor: torch.Tensor, offsets: Shape, lengths: Shape) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor
