"""Which tensors of a checkpoint make up the weights of a model, and under which names.

Guarantee: the names are the keys of the model's state dict, all of them. The averages of a run are completed by what
has no average: buffers are the model's own, tied weights follow the one that they are tied to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from framework.checkpoint.commands.opened import RUN, Opened
from framework.checkpoint.commands.values import shared_values
from framework.errors import CheckpointError
from framework.errors import suggest as near

MODEL, EMA = "model", "ema"
EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class Weights:
    """What is exported.

    Args:
        opened: The checkpoint.
        names: The checkpoint's key of each tensor, by the name it gets.
        extra: Modules' own kind of state that is no tensor, by name.
    """

    opened: Opened
    names: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)

    def groups(self) -> dict[str, list[str]]:
        """The names of each stored tensor, by its key: several where weights are tied."""
        ties = self.opened.ties()
        found: dict[str, list[str]] = {}
        for name, key in self.names.items():
            found.setdefault(ties.get(key, key), []).append(name)
        return found

    def check(self) -> None:
        """Compares the bytes of these tensors with their checksums.

        Raises:
            CheckpointError: They differ.
        """
        self.opened.check(f"verifying {self.opened.place}", set(self.names.values()))


def weights_of(opened: Opened, part: str) -> Weights:
    """The weights in a part of a checkpoint.

    Args:
        opened: The checkpoint.
        part: What stands before the keys, such as `model` or `app.model`; empty for all tensors as they are.

    Raises:
        CheckpointError: It has no such part; the message lists those it has.
    """
    _ = opened.folder
    entries = opened.entries
    names = _under(entries, part)
    if not names:
        parts = sorted({key.partition(".")[0] for key in entries})
        raise CheckpointError(
            f"{opened.place} has no part '{part}'.{near(part, parts)} There are: {', '.join(parts) or 'none'}. "
            f"Give --part NAME, or --part '' for all tensors under their own keys."
        )
    if opened.kind != RUN or part not in (MODEL, EMA):
        return Weights(opened, names)
    model = _under(entries, MODEL)
    if part == EMA:
        names = _completed(names, model, opened.ties())
    values = shared_values(opened).get("extra_state") or {}
    extra = {f"{name}.{EXTRA}" if name else EXTRA: value for name, value in values.items()}
    return Weights(opened, names, extra)


def _under(keys: Iterable[str], part: str) -> dict[str, str]:
    prefix = f"{part}." if part else ""
    return {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}


def _completed(averages: dict[str, str], model: dict[str, str], ties: dict[str, str]) -> dict[str, str]:
    """A key for each name of the model: the average where there is one."""
    by_owner = {ties.get(model[name], model[name]): key for name, key in averages.items() if name in model}
    names = {name: averages.get(name) or by_owner.get(ties.get(key, key), key) for name, key in model.items()}
    return names | averages
