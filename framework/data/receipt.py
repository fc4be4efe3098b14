"""What a batch was made of, as the code that loaded it says.

Guarantee: a receipt lists the ids that were really loaded, in the order of the batch, not those that were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from framework.data.stats import DataStats

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class Receipt:
    """The origin of one batch.

    Args:
        epochs: Epoch of each sample, int64 `[samples]`.
        ids: Id of each sample, int64 `[samples]`; where a sample was skipped or replaced, the id of what took its place.
        replaced: Places in the batch whose own sample could not be loaded: place → (its id, what was wrong with it).
        stats: What loading it counted.
    """

    epochs: Ids
    ids: Ids
    replaced: dict[int, tuple[int, str]] = field(default_factory=dict)
    stats: DataStats = field(default_factory=DataStats)
