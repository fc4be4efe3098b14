"""A rank that stands still in a step: the others end with its name, not with what gloo says."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed import World
from framework.errors import DistributedError
from framework.loop import lost_ranks
from framework.recipe import StepOutput
from tests.loop.ranks import in_ranks
from tests.loop.runs import Fit, core, events, make

STILL = 3


class Stuck(Fit):
    """Rank 1 stands still in the forward of a step, until the others have ended.

    Args:
        told: The file that says so.
    """

    def __init__(self, told: Path) -> None:
        super().__init__()
        self._told = told

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput | Tensor:
        if len(self.seen) == STILL - 1 and dist.get_rank() == 1:
            while not self._told.exists():
                time.sleep(0.01)
        return super().train_step(model, batch)


def stand_still(world: World, folder: Path) -> tuple[str, str]:
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=4))
    lost_ranks.ANSWER_SECONDS = 2.0
    told = folder / "told"
    try:
        make(folder / "run", Stuck(told), core(every=None), timeout="4s").fit()
    except DistributedError as error:
        return str(error), type(error.__cause__).__name__
    finally:
        told.touch()
    return "nobody was missed", ""


def test_a_rank_that_stands_still_in_a_step_is_named_by_the_others(tmp_path: Path) -> None:
    (message, cause), _ = in_ranks(2, stand_still, tmp_path)
    expected = (
        f"Rank 0: after step {STILL - 1} a call of torch waited for other ranks in vain (trainer.timeout=4s): rank 1 "
    )
    assert message.startswith(f"{expected}did not come within 2 s while the ranks looked for each other after that")
    assert "gloo" in message and cause == "RuntimeError"
    (failure,) = events(tmp_path / "run", "failure")
    assert (
        failure["type"] == "DistributedError"
        and failure["message"] == message
        and "RuntimeError" in failure["traceback"]
    )


@pytest.mark.parametrize(
    ("error", "is_meant"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("a step went wrong"), False),
        (ValueError("gloo"), False),
    ],
)
def test_what_torch_raises_for_a_lost_rank_is_known(error: Exception, is_meant: bool) -> None:
    assert lost_ranks.is_meant_by(error) is is_meant
