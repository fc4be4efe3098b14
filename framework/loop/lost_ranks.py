"""What is known when a call of torch gives up waiting for other ranks.

Guarantee: the error names the ranks that do not answer, the bound and its key, and costs at most the seconds that the
ranks have to answer. What torch said is its cause.
"""

from __future__ import annotations

import torch.distributed as dist

from framework.distributed import Group
from framework.errors import DistributedError

ANSWER_SECONDS = 5.0  # for ranks whose calls failed at about the same time
_GLOO = ("gloo", "caused pair closure")  # mostly a path of its sources; the second has none


def is_meant_by(error: BaseException) -> bool:
    """Whether a collective of torch raised it: what gloo raises is a plain RuntimeError."""
    is_gloo = type(error) is RuntimeError and any(words in str(error) for words in _GLOO)
    return is_gloo or isinstance(error, dist.DistError)


def named(group: Group, step: int, timeout: str, error: BaseException) -> DistributedError:
    """The error of a collective, with the ranks that do not answer. All ranks whose calls failed ask together.

    Args:
        group: Of all ranks.
        step: The last whole step.
        timeout: The bound of the collective, as the config has it.
        error: What it raised, which becomes the cause.
    """
    try:
        group.together("the ranks looked for each other after that", ANSWER_SECONDS)
        who = "all ranks still answer, so that one of them was only late: a longer trainer.timeout may help."
    except DistributedError as missing:
        who = str(missing)
    failure = DistributedError(
        f"Rank {group.world.rank}: after step {step} a call of torch waited for other ranks in vain "
        f"(trainer.timeout={timeout}): {who} torch said: {error}"
    )
    failure.__cause__ = error
    return failure
