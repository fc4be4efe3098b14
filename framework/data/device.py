"""Batches on their way to the device.

Guarantee: what is inside a nest of mappings, lists and tuples is moved, and the nest keeps its shape; what is no tensor
stays as it is. A batch that is copied ahead changes neither the order of batches nor what is said to be trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_MOVABLE = (torch.Tensor, tuple, list, dict, Mapping)  # the cheap ones to ask for first


def map_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The batch with every tensor in nested mappings, lists, tuples and named tuples changed; the rest as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) is tuple or type(batch) is list:  # before the classes below, which are slow to ask for
        return type(batch)([map_tensors(value, change) for value in batch])
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, change) for key, value in batch.items()}
        return items if type(batch) is dict else _like(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return _like(batch, [map_tensors(value, change) for value in batch])
    return batch


def _like(batch: Any, parts: Any) -> Any:
    """A container of the class of `batch` around other parts; a plain one where its class does not say how."""
    try:
        return type(batch)(parts)
    except TypeError:  # made from something else: a defaultdict from its factory
        if not isinstance(batch, dict | list):
            return dict(parts) if isinstance(batch, Mapping) else tuple(parts)
    clone = copy.copy(batch)  # of these the copy has a memory of its own
    if isinstance(clone, dict):
        clone.update(parts)
    else:
        clone[:] = parts
    return clone


def to_device(batch: Any, device: torch.device | str, channels_last: bool = False) -> Any:
    """The batch with its tensors on `device`; page-locked ones are copied without waiting.

    Args:
        batch: Tensors in nested mappings, lists and tuples; other values stay. An object of another class that has a
            method `to(device)` is moved by it.
        device: Where to.
        channels_last: Memory format of tensors with 4 dimensions (`[batch, channels, height, width]`).
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if channels_last and tensor.dim() == 4:
            return tensor.to(device, non_blocking=True, memory_format=torch.channels_last)
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    if not isinstance(batch, _MOVABLE) and hasattr(batch, "to"):
        return batch.to(device)
    return map_tensors(batch, move)


def pin(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory."""
    return map_tensors(batch, torch.Tensor.pin_memory)


def num_bytes(batch: Any) -> int:
    """Bytes of all tensors of a batch."""
    sizes: list[int] = []
    map_tensors(batch, lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
    return sum(sizes)


class DeviceBatches(Iterator[Any]):
    """Batches on the device, each copied while the one before it is computed with.

    On CUDA copies run on a stream of their own. The next batch is begun as soon as one is handed out, if it is there
    by then; a batch that is not is never waited for ahead of its time.

    Args:
        batches: On the CPU, best page-locked; may have `is_ready() -> bool`: whether the next one is there.
        device: Where to.
        channels_last: Memory format of tensors with 4 dimensions (`[batch, channels, height, width]`).
    """

    def __init__(self, batches: Iterator[Any], device: torch.device | str, channels_last: bool = False) -> None:
        self._batches = batches
        self._device = torch.device(device)
        self._channels_last = channels_last
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._is_ready: Callable[[], bool] = getattr(batches, "is_ready", lambda: False)
        self._ahead: Callable[[], Any] | None = None

    def __next__(self) -> Any:
        arrive, self._ahead = self._ahead or self._moved(next(self._batches)), None
        batch = arrive()
        if self._is_ready():
            try:
                self._ahead = self._moved(next(self._batches))
            except Exception as error:  # not the fault of the batch that is handed out now
                self._ahead = _raising(error)
        return batch

    def is_ready(self) -> bool:
        """Whether the next batch is here, so that asking for it takes no time."""
        return self._ahead is not None or self._is_ready()

    def _moved(self, batch: Any) -> Callable[[], Any]:
        """Begins to copy a batch; what is returned gives it to the stream that computes."""
        if self._stream is None or not isinstance(batch, _MOVABLE):  # tensors in foreign objects cannot be recorded
            moved = to_device(batch, self._device, self._channels_last)
            return lambda: moved
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device, self._channels_last)
            event = self._stream.record_event()

        def arrive() -> Any:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            # Else their memory could be given to the next copy while this stream still reads it.
            map_tensors(moved, lambda tensor: tensor.record_stream(current) if tensor.is_cuda else None)
            return moved

        return arrive


def _raising(error: Exception) -> Callable[[], Any]:
    def arrive() -> Any:
        raise error

    return arrive
