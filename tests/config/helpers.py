"""The recipe of a user, and what tests ask about a folder."""

from __future__ import annotations

import sys
from pathlib import Path

RECIPE = """
from torch import nn
from framework import Recipe


class Mine(Recipe):
    def __init__(self, *, smoothing: float = 0.1, **factories):
        super().__init__(**factories)
        self.smoothing = smoothing


def net(depth: int, width: int = 4):
    return nn.Linear(depth, width)


class Data(list):
    def __init__(self, root=None, transform=None, options=None):
        super().__init__([root, transform, options])


def transform(size: int = 1):
    return ("transform", size)
"""

CONFIG = """\
# @package _global_
recipe: {_target_: recipes.mine.Mine}
model: {_target_: recipes.mine.net, depth: 3}
optimizer: {_target_: torch.optim.SGD, lr: 1e-1, momentum: 0.9, nesterov: true}
data:
  root: null
  train: {_target_: recipes.mine.Data, root: "${data.root}", transform: {_target_: recipes.mine.transform}}
trainer: {max_steps: 5, global_batch_size: 8}
"""


def write(folder: Path, recipe: str = RECIPE, config: str = CONFIG, name: str = "mine") -> None:
    """A recipe module and its config, as a user has them."""
    for file, text in ((f"recipes/{name}.py", recipe), (f"configs/recipe/{name}.yaml", config)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


def forget_recipes() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("recipes", "own_callbacks")]:
        del sys.modules[name]


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}
