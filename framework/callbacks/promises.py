"""What no longer holds when a built-in callback is removed.

Guarantee: every built-in callback that a run lacks and that keeps a promise is named, with that promise.
"""

from __future__ import annotations

from collections.abc import Mapping

from framework import callbacks as built_in
from framework.callback import Callback


def broken(callbacks: Mapping[str, Callback]) -> list[str]:
    """One line for each promise that nobody keeps in this run.

    Args:
        callbacks: The callbacks of the run.
    """
    kinds = [type(one) for one in built_in.default_callbacks().values()]
    missing = [kind for kind in kinds if not any(isinstance(one, kind) for one in callbacks.values())]
    return [f"without {kind.__name__}: {kind.promise}" for kind in missing if kind.promise]
