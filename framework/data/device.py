"""Batches on their way to the device.

Guarantee: what is inside a nest of mappings, lists and tuples is moved, and the nest keeps its shape; what is no tensor
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


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
