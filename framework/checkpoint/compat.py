"""Everything of torch that is not promised to stay: private names, and the bytes of a saved tensor.

Guarantee: no other module of this package touches a private name of torch, and `self_test` proves, before a run
saves anything, that the installed torch reads the bytes that are laid out here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from framework.errors import CheckpointError

DCP_VERSION: str = filesystem.CURRENT_DCP_VERSION

# the classes in which torch writes `.metadata`; nothing else is built when one is read
RECORD_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (torch_metadata.__name__, name): getattr(torch_metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (StorageInfo.__module__, StorageInfo.__name__): StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
}

_HOLE_BYTES = 1 << 20  # a longer write of torch.save is the payload of a tensor and is not kept


@dataclass(frozen=True, slots=True)
class Framing:
    """The bytes that torch.save puts around the payload of a contiguous CPU tensor.

    Args:
        prefix: Before the payload.
        payload_bytes: Length of the payload.
        suffix: After it.
    """

    prefix: bytes
    payload_bytes: int
    suffix: bytes

    @property
    def size(self) -> int:
        """Bytes of the whole saved tensor."""
        return len(self.prefix) + self.payload_bytes + len(self.suffix)


class _Recorder:
    """A file for torch.save that keeps everything but a long payload."""

    def __init__(self) -> None:
        self.parts = [b""]
        self.hole = -1

    def write(self, data: Any) -> int:
        if len(data) > _HOLE_BYTES:
            self.hole = len(data)
            self.parts.append(b"")
        else:
            self.parts[-1] += bytes(data)
        return len(data)

    def flush(self) -> None:
        pass


@functools.lru_cache(maxsize=65536)
def framing(dtype: torch.dtype, shape: tuple[int, ...]) -> Framing:
    """The framing of a tensor; no memory of the tensor's size is used.

    Raises:
        CheckpointError: torch lays out saved tensors in a way that is not known here.
    """
    tensor = torch.empty(shape, dtype=dtype)
    file = _Recorder()
    if tensor.nbytes <= _HOLE_BYTES:
        tensor.zero_()
    with _no_checksums():
        torch.save(tensor, file)  # type: ignore[arg-type]
    if file.hole >= 0:
        found = Framing(file.parts[0], file.hole, file.parts[-1])
    else:
        raw = file.parts[0]
        begin = _payload_offset(raw) if tensor.numel() else len(raw)
        found = Framing(raw[:begin], tensor.nbytes, raw[begin + tensor.nbytes :])
    if found.payload_bytes != tensor.nbytes or len(file.parts) > 2:
        raise _unknown_layout(f"a tensor {dtype} {list(shape)} has {found.payload_bytes:,} bytes of payload")
    return found


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    """torch.save writes no checksum of its own, which would depend on the values (and which it never checks)."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _payload_offset(raw: bytes) -> int:
    try:
        reader: Any = torch._C.PyTorchFileReader(io.BytesIO(raw))
        return int(reader.get_record_offset("data/0"))
    except (AttributeError, RuntimeError) as error:
        raise _unknown_layout(str(error)) from error


def _unknown_layout(detail: str) -> CheckpointError:
    return CheckpointError(
        f"torch {torch.__version__} lays out saved tensors in a way that this version does not know: {detail}. "
        f"Use torch >=2.11,<2.15."
    )


def problems_of(plans: list[SavePlan], metadata: torch_metadata.Metadata) -> list[str]:
    """What is wrong with a plan of all ranks: parts of a tensor that overlap, lie outside of it, or are missing."""
    # torch says only yes or no up to 2.13
    found: Any = default_planner._validate_global_plan(plans, metadata)
    return ([] if found else ["the parts of a tensor overlap or are missing"]) if isinstance(found, bool) else found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: the tensor itself, or the shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def raw_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind a DTensor itself, where `local_part` makes a new view of it each time."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its values in memory, of whatever Python class it is."""
    kind: Any = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return True
    own = (kind.__torch_dispatch__, kind.__torch_function__)
    known: Any = (torch.Tensor, torch.nn.Parameter)
    return any(_same_method(own[0], one.__torch_dispatch__) for one in known) and any(
        _same_method(own[1], one.__torch_function__) for one in known
    )


def _same_method(one: Any, other: Any) -> bool:
    return getattr(one, "__func__", one) is getattr(other, "__func__", other)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(tensor, DTensor)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target and waits for it; releases the interpreter lock while it copies."""
    if not targets:
        return
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor that is not empty, writable, as bytes."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def pin(pointer: int, size: int) -> bool:
    """Page-locks memory for fast copies from CUDA devices. Returns whether that worked."""
    return int(_cuda_runtime().cudaHostRegister(pointer, size, 0)) == 0


def unpin(pointer: int) -> None:
    """Ends `pin`."""
    _cuda_runtime().cudaHostUnregister(pointer)


@functools.cache
def self_test() -> None:
    """Lays out saved tensors and lets torch read them, short and long, empty and scalar.

    Raises:
        CheckpointError: torch does not read back what was laid out.
    """
    samples = [
        torch.arange(300_000, dtype=torch.float32).view(300, 1000),
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ]
    for sample in samples:
        frame = framing(sample.dtype, tuple(sample.shape))
        payload = bytes_of(sample) if sample.numel() else b""
        raw = b"".join((frame.prefix, payload, frame.suffix))
        try:
            back = torch.load(io.BytesIO(raw), weights_only=True)
        except Exception as error:
            raise _unknown_layout(str(error)) from error
        if back.dtype != sample.dtype or not torch.equal(back, sample):
            raise _unknown_layout(f"a tensor {sample.dtype} {list(sample.shape)} is not read back as it was")


__all__ = [
    "DCP_VERSION",
    "RECORD_CLASSES",
    "Framing",
    "StorageInfo",
    "bytes_of",
    "copy_all",
    "framing",
    "is_distributed",
    "is_plain",
    "local_part",
    "pin",
    "problems_of",
    "raw_part",
    "self_test",
    "unpin",
]
