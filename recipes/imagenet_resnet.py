"""ResNets of torchvision on a folder of images in the layout of ImageNet, with handwritten digits as the default data.

Guarantee: images travel as uint8 and are normalised on the device; a sample is augmented alike in every run with the
same seed, whatever the number of ranks and loader processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.transforms import v2

from framework import Recipe, StepOutput
from framework.data import ImageFolder, VolumeDataset
from framework.data.digits import digits_root
from framework.data.files.source import is_on_disk
from framework.errors import ConfigError

DEPTHS = (18, 34, 50, 101, 152)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, per channel


def resnet(depth: int = 50, num_classes: int = 1000, small_images: bool = False) -> nn.Module:
    """A ResNet (He et al., 2015) for images `[batch, 3, height, width]`.

    Args:
        depth: One of 18, 34, 50, 101, 152.
        num_classes: Length of the output, `[batch, num_classes]`.
        small_images: Keeps the resolution of small images: a 3x3 stem without stride and without pooling.

    Raises:
        ConfigError: There is no ResNet of that depth.
    """
    if depth not in DEPTHS:
        raise ConfigError(f"model.depth={depth}: there are ResNets of depth {', '.join(map(str, DEPTHS))}.")
    model: nn.Module = getattr(torchvision.models, f"resnet{depth}")(weights=None, num_classes=num_classes)
    if small_images:
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def train_images(
    root: str | None = None,
    size: int = 224,
    scale: tuple[float, float] = (0.08, 1.0),
    flip: float = 0.5,
    shrink_to: int | None = None,
) -> ImageFolder | VolumeDataset:
    """Training images, `train/<class>/<image>` below `root`, cropped at random and flipped.

    Args:
        root: Folder or URL with `train` and `val`; none takes the handwritten digits that come with scikit-learn.
        size: Height and width of a sample, in pixels.
        scale: Smallest and largest share of an image's area that a crop covers.
        flip: Probability of a horizontal flip.
        shrink_to: JPEGs may be decoded at 1/2, 1/4 or 1/8 of their size, if both sides keep this many pixels; default
            never.
    """
    crop = v2.RandomResizedCrop(size, scale=tuple(scale), antialias=True)
    return _images(root, "train", v2.Compose([crop, v2.RandomHorizontalFlip(flip)]), shrink_to)


def eval_images(
    root: str | None = None, size: int = 224, resize: int = 256, shrink_to: int | None = None
) -> ImageFolder | VolumeDataset:
    """Evaluation images, `val/<class>/<image>` below `root`, resized and cropped at the centre.

    Args:
        root: As for `train_images`.
        size: Height and width of a sample, in pixels.
        resize: Length of the shorter side before the crop, in pixels.
        shrink_to: As for `train_images`.
    """
    return _images(root, "val", v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size)]), shrink_to)


def _images(root: str | None, part: str, transform: Any, shrink_to: int | None) -> ImageFolder | VolumeDataset:
    """A folder of a local disk as it is, a URL or a mount with look-ahead and cache: with the same labels and keys."""
    place = str(digits_root(_cache())) if root is None else root
    if "://" in place or not is_on_disk(Path(place) / part):
        return VolumeDataset(f"{place.rstrip('/')}/{part}", transform=transform, shrink_to=shrink_to)
    return ImageFolder(Path(place) / part, transform=transform, shrink_to=shrink_to)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "goodput-framework"


class ImageNetResNet(Recipe):
    """Image classification with label smoothing.

    Args:
        label_smoothing: Share of the target that is spread over all classes.
        **factories: Passed on to `Recipe`.
    """

    def __init__(self, *, label_smoothing: float = 0.1, **factories: Any) -> None:
        super().__init__(**factories)
        self._label_smoothing = label_smoothing
        self._scale: tuple[Tensor, Tensor] | None = None

    def train_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> StepOutput:
        images, labels = batch
        logits = model(self._normalised(images))
        return StepOutput(nn.functional.cross_entropy(logits, labels, label_smoothing=self._label_smoothing))

    def eval_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(self._normalised(images))
        for metric in self.metrics.values():
            metric.update(logits, labels)
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="none")}

    def build_metrics(self) -> dict[str, Any]:
        from torchmetrics.classification import MulticlassAccuracy

        classes = self._num_classes
        return {
            f"top{k}": MulticlassAccuracy(classes, top_k=k, average="micro", validate_args=False)
            for k in (1, 5)
            if k < classes
        }

    def build_model(self) -> nn.Module:
        model = super().build_model()
        head = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._num_classes = head[-1].out_features if head else 0
        return model

    def _normalised(self, images: Tensor) -> Tensor:
        """uint8 `[batch, 3, height, width]` as float32 of mean 0 and standard deviation 1, on the device."""
        if self._scale is None:
            shape = (1, 3, 1, 1)
            mean = torch.tensor(MEAN, device=images.device).view(shape)
            self._scale = 1 / (255 * torch.tensor(STD, device=images.device).view(shape)), mean
        factor, mean = self._scale
        return (images.float() - 255 * mean) * factor
