"""The bytes of this rank's shard files, in memory.

Guarantee: the memory is reserved, touched and, for CUDA tensors, page-locked once and reused; staging a state is one
copy of its tensors into it, after which the live tensors may change. The bytes are those of stock DCP shard files, so
that writing them is one sequential write.
"""

from __future__ import annotations

import contextlib
import logging
import mmap

import torch

from framework.checkpoint import compat
from framework.checkpoint.plan import Layout

log = logging.getLogger(__name__)


class Arena:
    """Memory that is kept from save to save.

    Args:
        size: Bytes, at least 1.
        pinned: Whether it is page-locked for copies from CUDA devices.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
    """Shard files in memory, reused for all saves of one layout; empty until `use` gives it one."""

    def __init__(self) -> None:
        self.layout = Layout((), (), ())
        self._arena: Arena | None = None
        self._targets: list[torch.Tensor] = []
        self._keys: list[str] = []

    def use(self, layout: Layout, *, pinned: bool) -> None:
        """Lays the memory out anew, and reserves more if there is too little.

        Args:
            layout: What this rank writes.
            pinned: Whether tensors come from CUDA devices.
        """
        if self.layout is layout:
            return
        self.layout, self._targets, self._keys = Layout((), (), ()), [], []
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
        self.layout, self._targets, self._keys = Layout((), (), ()), [], []
        if self._arena is not None:
            self._arena.release()
            self._arena = None

    def stage(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies the tensors of this rank's part; when it returns, the live ones may change.

        Args:
            tensors: The live tensors by joined key.
        """
        compat.copy_all(self._targets, [compat.local_part(tensors[key]) for key in self._keys])

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
                self._keys.append(entry.key)
                self._targets.append(arena.tensor[begin:end].view(entry.dtype).view(entry.shape))
