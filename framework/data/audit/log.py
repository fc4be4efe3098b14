"""The ids of every trained batch, one small file per attempt and rank.

Guarantee: a record is one `write()` with a length and a checksum, so that a process killed at any byte leaves at most
one torn record at the end, which is dropped in reading. Reading runs no code and takes no more memory than the file.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from framework.data.receipt import Ids, Receipt
from framework.errors import DataError

MAGIC = b"audit/1\n"
BEGIN, STEP, BACK, LEFT_OUT = 1, 2, 3, 4
_HEAD = struct.Struct("<BII")  # kind, length of what follows, its crc32
_STEP = struct.Struct("<QIIBI")  # step, samples, runs of one epoch, bytes of an id, bytes of what was replaced
_RUN = struct.Struct("<qI")  # epoch, samples
_NUMBER = struct.Struct("<Q")


def log_path(events: Path, attempt: int, rank: int) -> Path:
    """Where the log of one rank of one attempt lies, beside its journal."""
    return events / f"att-{attempt:04d}" / f"rank{rank}.audit"


@dataclass(frozen=True, slots=True)
class Trained:
    """The samples of one step on one rank.

    Args:
        step: The optimizer step.
        epochs: Epoch of each sample, int64 `[samples]`.
        ids: Id of each sample, int64 `[samples]`; at places that are in `replaced`, of what took the sample's place.
        replaced: Place → the id that could not be loaded.
    """

    step: int
    epochs: Ids
    ids: Ids
    replaced: dict[int, int] = field(default_factory=dict)


class AuditLog:
    """Writes one log.

    Args:
        path: The file; its folder is made. It must not exist yet.
        facts: JSON values about the attempt: `attempt`, `rank`, `world`, `step`, `samples`, …
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write(MAGIC)
        self._record(BEGIN, json.dumps(facts).encode())

    def trained(self, step: int, receipts: Sequence[Receipt]) -> None:
        """The batches of a step were trained."""
        epochs = np.concatenate([np.empty(0, np.int64), *(receipt.epochs for receipt in receipts)])
        ids = np.concatenate([np.empty(0, np.int64), *(receipt.ids for receipt in receipts)])
        replaced: dict[str, int] = {}
        first = 0
        for receipt in receipts:
            replaced |= {str(first + place): index for place, (index, _) in receipt.replaced.items()}
            first += len(receipt.ids)
        edges = np.flatnonzero(np.diff(epochs, prepend=epochs[:1] - 1)).tolist()
        lengths = np.diff([*edges, len(epochs)]).tolist()
        width = 8 if len(ids) and (ids.max() > 0xFFFFFFFF or ids.min() < 0) else 4
        extra = json.dumps(replaced).encode() if replaced else b""
        self._record(
            STEP,
            _STEP.pack(step, len(ids), len(edges), width, len(extra))
            + b"".join(_RUN.pack(int(epochs[at]), length) for at, length in zip(edges, lengths, strict=True))
            + ids.astype("<i8" if width == 8 else "<u4").tobytes()
            + extra,
        )

    def back(self, step: int) -> None:
        """Training goes on from `step`: what came after it does not count any more."""
        self._record(BACK, _NUMBER.pack(step))

    def left_out(self, step: int) -> None:
        """The update of this step was left out: its samples changed nothing."""
        self._record(LEFT_OUT, _NUMBER.pack(step))

    def sync(self) -> None:
        """Everything so far is on the disk when this returns."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _record(self, kind: int, payload: bytes) -> None:
        self._write(_HEAD.pack(kind, len(payload), zlib.crc32(payload)) + payload)

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written: {error.strerror}. The audit would be incomplete."
            ) from error
        if written != len(data):
            raise DataError(f"{self.path}: only {written} of {len(data)} bytes could be written; is the disk full?")


def read_log(path: Path) -> Iterator[tuple[int, Any]]:
    """The records of a log in order; what is torn at its end is dropped.

    Yields:
        `BEGIN` with the facts, `STEP` with a `Trained`, `BACK` and `LEFT_OUT` with a step.

    Raises:
        DataError: It is no such log, or is damaged before its end.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):  # killed at once
            return
        raise DataError(f"{path} is no audit log of this version (it begins with {data[: len(MAGIC)]!r}).")
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        kind, length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length:
            return
        if zlib.crc32(payload) != checksum:
            raise DataError(f"{path} is damaged at byte {at}. Nothing can be proved with it.")
        try:
            yield kind, _decoded(kind, payload)
        except (ValueError, struct.error, IndexError, KeyError) as error:
            raise DataError(f"{path} is damaged at byte {at}: {error}. Nothing can be proved with it.") from error
        at += _HEAD.size + length


def _decoded(kind: int, payload: bytes) -> Any:
    if kind == BEGIN:
        facts = json.loads(payload)
        return {name: int(facts[name]) for name in ("attempt", "rank", "world", "step", "samples")} | {
            "strategy": str(facts["strategy"]),
            "epoch_end": str(facts["epoch_end"]),
            "global_batch": int(facts["global_batch"]),
            "starts": [int(start) for start in facts["starts"]],
            "readers": int(facts.get("readers", 0)),
        }
    if kind == STEP:
        return _trained(payload)
    return _NUMBER.unpack(payload)[0]


def _trained(payload: bytes) -> Trained:
    step, samples, runs, width, extra = _STEP.unpack_from(payload)
    at = _STEP.size
    parts = [_RUN.unpack_from(payload, at + number * _RUN.size) for number in range(runs)]
    at += runs * _RUN.size
    if sum(length for _, length in parts) != samples or at + samples * width + extra != len(payload):
        raise ValueError("its lengths do not fit together")
    ids = np.frombuffer(payload, "<i8" if width == 8 else "<u4", samples, at).astype(np.int64)
    epochs = np.repeat(
        np.array([epoch for epoch, _ in parts], dtype=np.int64), np.array([length for _, length in parts], dtype=int)
    )
    replaced = json.loads(payload[len(payload) - extra :]) if extra else {}
    return Trained(step, epochs, ids, {int(place): int(index) for place, index in replaced.items()})
