"""Two checkpoints compared bit for bit.

Guarantee: both are verified before. At most a batch of tensors, or one long tensor, of each is in memory at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from framework.checkpoint.commands.opened import Opened
from framework.checkpoint.commands.values import LAYOUT, SHARED, differing, python_values, raw_bytes
from framework.speaking import progress

ELEMENTS = 16 << 20  # compared at a time


def compare(first: Opened, second: Opened, *, with_values: bool = True) -> dict[str, Any]:
    """What differs between A and B, as JSON values.

    Args:
        first: A.
        second: B.
        with_values: Whether Python values are compared too.

    Raises:
        CheckpointError: One is damaged, or its files cannot be read.
    """
    for opened in (first, second):
        opened.folder.stat()
        opened.check(f"verifying {opened.place}")
    ours, theirs = first.entries, second.entries
    both = [key for key in first.ordered() if key in theirs]
    alike = [key for key in both if ours[key] == theirs[key]]
    found = {key: _of_kind(key, ours[key], theirs[key]) for key in both if ours[key] != theirs[key]}
    with progress("comparing", sum(map(first.size_of, alike))) as report:
        for keys in first.batches(alike):
            a, b = first.read(keys), second.read(keys)
            for key in keys:
                if (one := _of_bytes(key, a[key], b[key])) is not None:
                    found[key] = one
                report(first.size_of(key))
    differences = [found[key] for key in both if key in found]
    only_in_a, only_in_b = [k for k in ours if k not in theirs], [k for k in theirs if k not in ours]
    values, notes = _values(first, second) if with_values else ([], [])
    return {
        "equal": not (differences or only_in_a or only_in_b or values),
        "first": first.place,
        "second": second.place,
        "tensors": {
            "equal": len(both) - len(differences),
            "different": len(differences),
            "only_in_a": len(only_in_a),
            "only_in_b": len(only_in_b),
        },
        "first_difference": differences[0] if differences else None,
        "differences": differences,
        "only_in_a": only_in_a,
        "only_in_b": only_in_b,
        "values": values,
        "notes": notes,
    }


def _of_kind(key: str, ours: tuple[torch.Size, torch.dtype], theirs: tuple[torch.Size, torch.dtype]) -> dict[str, Any]:
    a, b = (f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in (ours, theirs))
    return {"key": key, "index": None, "a": a, "b": b}


def _of_bytes(key: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any] | None:
    """The first element that differs and how many do; none if the tensors are equal."""
    x, y = raw_bytes(a), raw_bytes(b)
    if torch.equal(x, y):
        return None
    width = a.dtype.itemsize
    first, count = -1, 0
    for begin in range(0, len(x), ELEMENTS * width):
        end = begin + ELEMENTS * width
        differs = (x[begin:end] != y[begin:end]).reshape(-1, width).any(1)
        number = int(differs.sum())
        if number and first < 0:
            first = begin // width + int(differs.nonzero()[0])
        count += number
    at = slice(first * width, (first + 1) * width)
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    return {
        "key": key,
        "index": index,
        "a": repr(a.reshape(-1)[first].item()),
        "b": repr(b.reshape(-1)[first].item()),
        "a_bits": _bits(x[at]),
        "b_bits": _bits(y[at]),
        "count": count,
        "of": a.numel(),
    }


def _bits(raw: torch.Tensor) -> str:
    return "0x" + bytes(raw.tolist())[::-1].hex()


def _values(first: Opened, second: Opened) -> tuple[list[dict[str, str]], list[str]]:
    """Python values that differ, and what was not compared."""
    ours, theirs = python_values(first), python_values(second)
    notes = []
    if first.kind != second.kind:
        return [], [f"Python values are not compared: A is of kind {first.kind}, B of kind {second.kind}"]
    for name in LAYOUT if first.header is not None and second.header is not None else ():
        a, b = (one[SHARED].get(name) for one in (ours, theirs))
        if a != b:
            notes.append(f"not counted as a difference: {name} is {a} in A and {b} in B")
    ranks = [len([part for part in one if part.startswith("rank ")]) for one in (ours, theirs)]
    if first.header is not None and ranks[0] != ranks[1]:
        notes.append(f"the values of ranks are not compared: A has {ranks[0]} ranks, B has {ranks[1]}")
        ours, theirs = ({SHARED: one[SHARED]} for one in (ours, theirs))
    sides = {True: "a value", False: "nothing"}
    rows = [
        {"path": part, "a": sides[part in ours], "b": sides[part in theirs]}
        for part in sorted(ours.keys() ^ theirs.keys())
    ]
    for part in ours:
        if part in theirs:
            rows += [{"path": path, "a": a, "b": b} for path, a, b in differing(ours[part], theirs[part], part)]
    return rows, notes
