"""Folders of images for the cases, and what a run says about them.

Guarantee: images are as small as they can be; the same arguments give the same files.
"""

from __future__ import annotations

import re
from pathlib import Path

from case_tools import PARTS
from PIL import Image

from framework.data.audit.check import Audit, audit

README = (Path(__file__).parents[2] / "README.md").read_text()
AUDIT = "callbacks.data_position.audit=true"


KINDS = {"folder": "framework.data.ImageFolder", "volume": "framework.data.VolumeDataset"}
SOURCE = {"folder": "root", "volume": "source"}


def job(kind: str, root: Path | str, *words: str, evaluation: Path | None = None) -> tuple[str, ...]:
    """The words of a run over images of 8 x 8 pixels: batches of 4, without the rest of the tests' job."""
    data = f"{{_target_: {KINDS[kind]}, {SOURCE[kind]}: '{root}', transform: {{_target_: {PARTS}.small}}}}"
    same = (
        "+recipe=job", f"recipe._target_={PARTS}.ImageJob", f"model={{_target_: {PARTS}.image_model}}",
        f"data.train={data}", "~data.train.samples", "~callbacks.ids", "trainer.global_batch_size=4", "run.name=r",
        "trainer.max_steps=6", "trainer.eval_every=null",
    )  # fmt: skip
    if evaluation is None:
        return (*same, "~data.eval", *words)
    data = data.replace(str(root), str(evaluation))
    return (*same, f"data.eval={data}", "~data.eval.samples", "~data.eval.offset", "~data.eval.noise", *words)


def picture(path: Path, shade: int = 90, size: tuple[int, int] = (8, 8)) -> Path:
    """Writes an image of one shade; its kind is that of its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 0, 0)).save(path)
    return path


def pictures(root: Path, count: int, classes: int = 2) -> Path:
    """Writes `root/<class>/<number>.png`; returns the root."""
    for number in range(count):
        picture(root / str(number % classes) / f"{number:03d}.png", number)
    return root


def readme_module(folder: Path) -> None:
    """Writes the module with both shapes of a stream of paths that the README shows: `folder/recipes/photos.py`."""
    (text,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Photos" in text]
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    (folder / "recipes" / "photos.py").write_text(text)


def audited(run: Path, samples: int, epochs: int) -> Audit:
    """Checks that the audit of a run proves so many whole epochs of so many samples.

    Raises:
        AssertionError: It does not.
    """
    result = audit(run / "events")
    assert result.is_clean, (result.gaps, result.epochs)
    whole = [each for each in result.epochs if each.is_over]
    assert [each.trained + len(each.damaged) for each in whole] == [samples] * epochs
    return result
