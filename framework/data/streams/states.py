"""The state of a dataset while it is read: its own, and that of the random generators that it keeps for itself.

Guarantee: what `capture` gave leads a fresh copy of the dataset on as `capture` found it, as far as the dataset's own
`load_state_dict` does; it is plain values, pickled to be out of reach of what comes later.
"""

from __future__ import annotations

import pickle
from typing import Any

from framework.data.private import Generators
from framework.data.seeding import sample_key
from framework.data.streams.plain import decoded, encoded


def prepared(dataset: Any, seed: int, epoch: int) -> Generators:
    """Seeds the private generators of a dataset for an epoch, alike for all readers: they may share out by one order."""
    generators = Generators(dataset=dataset)
    generators.seed(sample_key(seed, epoch, "stream/private"))
    return generators


def capture(dataset: Any, generators: Generators) -> bytes:
    """Where a dataset is.

    Raises:
        DataError: Its state is none of plain values.
    """
    state = {"dataset": encoded(dataset.state_dict(), f"{type(dataset).__name__}.state_dict()")}
    if generators:
        state["generators"] = encoded(generators.state(), "the random generators")
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


def put_back(dataset: Any, generators: Generators, state: bytes) -> None:
    """Leads a dataset to where `capture` found it."""
    saved = decoded(pickle.loads(state))
    dataset.load_state_dict(saved["dataset"])
    if "generators" in saved:
        generators.restore(saved["generators"])
