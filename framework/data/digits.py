"""A small set of real images that needs no download: scikit-learn's 1,797 handwritten digits as JPEG files.

Guarantee: the folder is there completely or not at all, however many processes ask for it at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

SIDE = 32  # pixels of an image's edge; the originals have 8
EVAL_EVERY = 5  # of each class, every fifth image is for evaluation
_NAME = "digits-1"  # the number changes when the files do


def digits_root(cache_dir: str | Path) -> Path:
    """A folder with `train/<digit>/*.jpg` and `val/<digit>/*.jpg`, written by the first who asks.

    The images are RGB, 32 × 32 pixels; 1,442 are for training, 355 for evaluation, each class split alike.

    Args:
        cache_dir: Where to put it; made if missing.

    Raises:
        OSError: The folder cannot be written.
    """
    root = Path(cache_dir) / _NAME
    if root.is_dir():
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{_NAME}-", dir=root.parent))
    try:
        _write(building)
        building.chmod(0o755)  # mkdtemp lets in nobody else
        with contextlib.suppress(OSError):  # another process was first: its files are the same
            os.rename(building, root)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if not root.is_dir():
        raise OSError(f"{root} could not be put in place. Check that {root.parent} can be written.")
    return root


def _write(folder: Path) -> None:
    from sklearn.datasets import load_digits  # takes seconds to import, so only where it is needed

    pixels, labels = load_digits(return_X_y=True)
    seen = [0] * 10
    for number, (values, label) in enumerate(zip(pixels, labels, strict=True)):
        split = "val" if seen[label] % EVAL_EVERY == EVAL_EVERY - 1 else "train"
        seen[label] += 1
        path = folder / split / str(label) / f"digit_{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(values.reshape(8, 8), path)


def _save(values: npt.NDArray[np.float64], path: Path) -> None:
    """Writes one digit, given as 8 × 8 values from 0 to 16."""
    from PIL import Image

    image = Image.fromarray(np.round(values * (255 / 16)).astype(np.uint8))
    large = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB")
    large.save(path, "JPEG", quality=95, subsampling=0)
