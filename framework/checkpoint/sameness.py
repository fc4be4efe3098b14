"""Whether tensors stayed as they were between a safe point and the next update.

Guarantee: a change through torch is seen by its counters. One that torch does not count (through `.data`, or numpy's
view of the memory) is seen by `differing`, which compares all bytes, and, where it changes whole tensors, by `Samples`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from framework.checkpoint.staging import Pair

SAMPLED = 64  # tensors looked at in each save
SAMPLE_ELEMENTS = 256


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


class Samples:
    """A few values of some tensors, as they are when this object is made.

    What torch does not count cannot be compared in full at each save; all tensors have their turn.

    Args:
        flat: Tensors `[elements]` in CPU memory by key; views of the live ones.
        turn: Which save this is.
    """

    def __init__(self, flat: Sequence[tuple[str, torch.Tensor]], turn: int) -> None:
        begin = turn * SAMPLED % max(len(flat), 1)
        chosen = [*flat[begin : begin + SAMPLED], *flat[: max(0, begin + SAMPLED - len(flat))]][: len(flat)]
        self._keys = [key for key, _ in chosen]
        self._live = [_part(live, turn) for _, live in chosen]
        with torch.no_grad():
            self._then = [live.clone() for live in self._live]

    def changed(self) -> list[str]:
        """Keys of the tensors among them that are not what they were."""
        pairs = zip(self._keys, self._then, self._live, strict=True)
        return [key for key, then, live in pairs if not _is_same(then, live)]


def _part(flat: torch.Tensor, turn: int) -> torch.Tensor:
    """Some consecutive elements, others at each turn."""
    begin = turn * 7919 * SAMPLE_ELEMENTS % max(flat.numel() - SAMPLE_ELEMENTS, 1)
    return flat[begin : begin + SAMPLE_ELEMENTS]


def differing(copies: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Keys whose tensors have other bytes than their copies.

    Args:
        copies: Copy in CPU memory (contiguous) and live tensor of each part, by key.
    """
    return [key for key, pairs in copies.items() if not all(_is_same(copy, live) for copy, live in pairs)]


def _is_same(copy: torch.Tensor, live: torch.Tensor) -> bool:
    return torch.equal(_bytes(copy), _bytes(live))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes a NaN equals itself, and 0.0 is not -0.0."""
    now = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return now.view(-1).view(torch.uint8)
