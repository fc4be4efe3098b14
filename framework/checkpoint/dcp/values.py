"""Python values of a checkpoint: read without running code, and compared between ranks by what they hold.

Guarantee: `load` builds numbers, strings, containers, tensors and numpy arrays, and what the user has declared safe by
`torch.serialization.add_safe_globals`; anything else is refused, naming it. Two values that are equal have the same
digest, however their bytes were pickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from zlib_ng.zlib_ng import crc32

from framework.checkpoint import compat
from framework.errors import CheckpointError

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_lock = threading.Lock()  # torch's list of what is safe is one for the process


@functools.cache
def _numpy_globals() -> tuple[Any, ...]:
    """What pickles of numpy's arrays and numbers name; they were written under either name of numpy's core."""
    array, number = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
    found: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found += [(array, f"{core}._reconstruct"), (number, f"{core}.scalar")]
    return tuple(found)


@contextlib.contextmanager
def _numpy_allowed() -> Iterator[None]:
    with _lock:
        before = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([entry for entry in _numpy_globals() if entry not in before]):
            yield


def load(data: bytes, what: str) -> Any:
    """A value as torch saved it, on the CPU, without running code.

    Args:
        data: The bytes that torch.save wrote.
        what: What it is, for the message.

    Raises:
        CheckpointError: It holds something else than values, or is damaged.
    """
    try:
        with _numpy_allowed():
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything here
        raise CheckpointError(
            f"{what} is not loaded without running code. Use numbers, strings, lists, dicts, tensors and numpy arrays, "
            f"or declare the class by torch.serialization.add_safe_globals. torch says: {_short(str(error))}."
        ) from error


def _short(text: str) -> str:
    """What torch says of a value that it does not load, without its advice."""
    if match := _GLOBAL.search(text):
        return f"it needs {match[1]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in lines if "Unsupported" in line), lines[0])[:200].rstrip(".")


def dump(value: Any) -> bytes:
    """A value as torch saves it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def digest(value: Any) -> bytes:
    """16 bytes that are the same for equal values."""
    into = hashlib.blake2b(digest_size=16)
    _feed(into, value)
    return into.digest()


def _feed(into: Any, value: Any) -> None:
    into.update(f"{type(value).__name__}:".encode())
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | bytearray():
            into.update(repr(value).encode())
        case torch.Tensor():
            into.update(f"{value.dtype}{tuple(value.shape)}{sum_of(value):08x}".encode())
        case np.ndarray() if value.dtype != object:
            into.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
        case np.generic():
            into.update(value.dtype.str.encode() + value.tobytes())
        case Mapping():
            for key in sorted(value, key=repr):
                _feed(into, key)
                _feed(into, value[key])
        case list() | tuple():
            for entry in value:
                _feed(into, entry)
        case set() | frozenset():
            for entry in sorted(value, key=repr):
                _feed(into, entry)
        case _:
            into.update(pickle.dumps(value, protocol=4))
    into.update(b";")


def sum_of(tensor: torch.Tensor) -> int:
    """The checksum of a tensor's values in memory order of its shape."""
    if not is_plain(tensor):
        return crc32(dump(tensor.detach().cpu()))
    flat = on_host(tensor)
    return crc32(compat.bytes_of(flat)) if flat.numel() else 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but numbers in memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a plain tensor, contiguous on the CPU; the tensor itself if it is so already."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
