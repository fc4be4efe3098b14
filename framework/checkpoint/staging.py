"""Copies tensors in pieces, by whoever has time: a thread beside the training, and whoever waits for it.

Guarantee: a piece is copied once. `finish` returns when all are copied; it takes part itself, so that it never only
waits. The interpreter lock is released while bytes are copied. Copies from CUDA devices are queued on a stream of
their own; the compute stream waits for them on the device, not the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

PIECE_BYTES = 16 << 20  # at most this much is waited for when another thread copies the last one

Pair = tuple[torch.Tensor, torch.Tensor]
Piece = tuple[list[torch.Tensor], list[torch.Tensor]]


def cut(pairs: Iterable[Pair]) -> list[Piece]:
    """Groups of small tensors and parts of large ones, each of about 16 MiB.

    Args:
        pairs: Target and source; targets are contiguous, sources of the same shape and dtype.
    """
    pieces: list[Piece] = []
    group: Piece = ([], [])
    size = 0
    for target, source in pairs:
        if target.nbytes > PIECE_BYTES and source.is_contiguous():
            flat, live = target.view(-1), source.view(-1)
            step = PIECE_BYTES // target.itemsize
            pieces += [([flat[at : at + step]], [live[at : at + step]]) for at in range(0, flat.numel(), step)]
            continue
        group[0].append(target)
        group[1].append(source)
        size += target.nbytes
        if size >= PIECE_BYTES:
            pieces.append(group)
            group, size = ([], []), 0
    if group[0]:
        pieces.append(group)
    return pieces


def copy(pieces: Iterable[Piece]) -> None:
    """Copies all of them now; from a CUDA device they are only queued on its current stream."""
    with torch.no_grad():
        for targets, sources in pieces:
            torch._foreach_copy_(targets, sources, non_blocking=True)


class Copying:
    """Copies under way.

    Args:
        pieces: What to copy.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.error: BaseException | None = None
        self._left = deque(pieces)
        self._open = len(pieces)
        self._lock = threading.Lock()
        self._done = threading.Event()
        if not pieces:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether everything is copied."""
        return self._done.is_set()

    def finish(self) -> None:
        """Copies what is left and waits for what others copy; an error is kept in `error`."""
        while self._left:
            try:
                piece = self._left.popleft()
            except IndexError:  # another thread took the last one
                break
            try:
                copy([piece])
            except BaseException as problem:
                self.error = self.error or problem
                if not isinstance(problem, Exception):  # Ctrl-C: whoever waits for this piece must not wait for ever
                    raise
            finally:
                with self._lock:
                    self._open -= 1
                    if self._open == 0:
                        self._done.set()
        self._done.wait()


class DeviceCopying:
    """Copies from CUDA devices, queued on a stream of their own.

    Args:
        pieces: What to copy; each piece is of one device.
        streams: The stream for each device; made here where there is none.
    """

    def __init__(self, pieces: Sequence[Piece], streams: dict[torch.device, Any]) -> None:
        self._pieces = pieces  # keeps the sources until they are copied
        self._events: list[tuple[torch.device, Any]] = []
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece[1][0].device, []).append(piece)
        for device, found in by_device.items():
            stream = streams.get(device)
            if stream is None:
                stream = streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copy(found)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._events.append((device, event))

    def hold_compute(self) -> None:
        """Makes the compute streams wait for the copies; returns at once."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """Waits until the bytes are in memory."""
        for _, event in self._events:
            event.synchronize()


def mark(devices: Iterable[torch.device]) -> list[Any]:
    """Events behind everything that is queued on the current streams of CUDA devices."""
    events = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
