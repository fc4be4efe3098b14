"""The bytes of this rank's shard files, in memory.

Guarantee: the memory is reserved, touched and, for CUDA tensors, page-locked once and reused. The bytes are those of
stock DCP shard files, so that copying the tensors into `targets` is all that is left to do, and writing them is one
sequential write.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import weakref

import torch

from framework.checkpoint import compat
from framework.checkpoint.plan import Entry, Layout

log = logging.getLogger(__name__)

_EMPTY = Layout((), (), ())
_memories: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_for_ever() -> None:
    """In a forked child: the memory is not there, so giving it back would unmap whatever lies at its address."""
    for memory in _memories:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_for_ever)


class Arena:
    """Memory that is kept from save to save.

    Args:
        size: Bytes, at least 1.
        pinned: Whether it is page-locked for copies from CUDA devices.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _memories.add(memory)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        # a loader worker forked later would make every page copy-on-write, and the next save pay for it
        memory.madvise(mmap.MADV_DONTFORK)
        self.size = size
        self.bytes = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.pinned = pinned and compat.pin(self.tensor.data_ptr(), size)
        if pinned and not self.pinned:
            log.warning("The %.1f GB of memory for saves could not be page-locked; copies take longer.", size / 1e9)

    def release(self) -> None:
        """Ends the page-locking; the memory itself goes with the last reference."""
        if self.pinned:
            compat.unpin(self.tensor.data_ptr())
            self.pinned = False


class Image:
    """Shard files in memory, reused for all saves of one layout; empty until `use` gives it one.

    Attributes:
        layout: What it is laid out for.
        targets: Each entry that has bytes, with the memory that its tensor is copied into.
    """

    def __init__(self) -> None:
        self.layout = _EMPTY
        self.targets: list[tuple[Entry, torch.Tensor]] = []
        self._arena: Arena | None = None

    def use(self, layout: Layout, *, pinned: bool) -> None:
        """Lays the memory out anew, and reserves more if there is too little.

        Args:
            layout: What this rank writes.
            pinned: Whether tensors come from CUDA devices.
        """
        if self.layout is layout:
            return
        self.layout, self.targets = _EMPTY, []
        size = layout.memory_bytes
        if self._arena is not None and (self._arena.size < size or (pinned and not self._arena.pinned)):
            self.release()  # first, so that there are never two
        if self._arena is None:
            self._arena = Arena(max(size, 1), pinned=pinned)
        self._arena.tensor[:size].zero_()  # touches every page now, so that no save does
        self._frame(layout, self._arena)
        self.layout = layout

    def release(self) -> None:
        """Gives the memory back."""
        self.layout, self.targets = _EMPTY, []
        if self._arena is not None:
            self._arena.release()
            self._arena = None

    def files(self) -> list[memoryview]:
        """The bytes of each shard file."""
        if self._arena is None:
            return []
        layout, memory = self.layout, self._arena.bytes
        return [memory[at : at + size] for at, size in zip(layout.starts, layout.sizes, strict=True)]

    def _frame(self, layout: Layout, arena: Arena) -> None:
        """Writes what stands around the payloads, and makes the views that the payloads are copied into."""
        for entry in layout.entries:
            frame = entry.framing
            start = layout.starts[entry.number] + entry.offset
            begin = start + len(frame.prefix)
            end = begin + frame.payload_bytes
            arena.bytes[start:begin] = frame.prefix
            arena.bytes[end : end + len(frame.suffix)] = frame.suffix
            if frame.payload_bytes:
                self.targets.append((entry, arena.tensor[begin:end].view(entry.dtype).view(entry.shape)))
