"""Whether tensors stayed as they were between a safe point and the next update.

Guarantee: a change through torch is seen by its counters; one that torch does not count (through `.data`, or a view
of the memory) is seen by `differing`, which compares bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from framework.checkpoint.staging import Pair


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether torch counts the changes of a tensor; it does not for those made in inference mode."""
    return not tensor.is_inference()


class Versions:
    """torch's counters of changes, as they are when this object is made.

    Args:
        tensors: The tensors, all of them counted.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._then = [tensor._version for tensor in tensors]

    def changed(self) -> list[int]:
        """Indices of the tensors that were changed since."""
        now = [tensor._version for tensor in self._tensors]
        if now == self._then:
            return []
        return [index for index, pair in enumerate(zip(now, self._then, strict=True)) if pair[0] != pair[1]]


def differing(copies: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Keys whose tensors have other bytes than their copies.

    Args:
        copies: Copy in CPU memory (contiguous) and live tensor of each part, by key.
    """
    return [key for key, pairs in copies.items() if not all(_is_same(copy, live) for copy, live in pairs)]


def _is_same(copy: torch.Tensor, live: torch.Tensor) -> bool:
    now = live.detach().to("cpu").contiguous()
    # as bytes: a NaN equals itself, and 0.0 is not -0.0
    return torch.equal(copy.view(-1).view(torch.uint8), now.view(-1).view(torch.uint8))
