"""Folders of images: what is found, in which order, and what a damaged file says."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from framework.data import VolumeDataset
from framework.data.digits import digits_root
from framework.data.images import ImageFolder, read_image
from framework.errors import ConfigError, DataError


def picture(path: Path, shade: int = 90, mode: str = "RGB", size: tuple[int, int] = (12, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, shade).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    picture(tmp_path / "dog" / "b.jpg", 10)
    picture(tmp_path / "dog" / "a.PNG", 20)
    picture(tmp_path / "dog" / "more" / "z.jpeg", 30)
    picture(tmp_path / "Cat" / "é \n1.png", 40)
    picture(tmp_path / ".ipynb_checkpoints" / "x.jpg")
    picture(tmp_path / "dog" / ".hidden" / "x.jpg")
    picture(tmp_path / "dog" / "._b.jpg")
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dog" / "circle").symlink_to(tmp_path / "dog")
    return tmp_path


def test_classes_and_files_come_in_byte_order_without_hidden_ones(root: Path) -> None:
    folder = ImageFolder(root)
    assert folder.classes == ["Cat", "dog", "empty"]
    keys = [folder.sample_key(i) for i in range(len(folder))]
    assert keys == ["Cat/é \n1.png", "dog/a.PNG", "dog/b.jpg", "dog/more/z.jpeg"]
    assert [folder[i][1] for i in range(4)] == [0, 1, 1, 1]
    assert [int(folder[i][0].float().mean().round()) for i in range(4)] == [40, 20, 10, 30]


def test_a_volume_has_the_same_labels_and_keys_for_the_same_files(root: Path, tmp_path: Path) -> None:
    (root / "dog" / "up").symlink_to(root)
    (root / "loop").symlink_to(root)
    (root / "dog" / "again").symlink_to(root / "dog" / "more")
    (root / "dog" / os.fsdecode(b"\xff .jpg")).write_bytes((root / "dog" / "b.jpg").read_bytes())

    def found(dataset: Any) -> dict[str, tuple[int, bytes]]:
        samples = [(dataset.sample_key(index), *dataset[index]) for index in range(len(dataset))]
        return {key: (label, image.numpy().tobytes()) for key, image, label in samples}

    folder, volume = ImageFolder(root), VolumeDataset(root)
    assert found(folder) == found(volume) and folder.classes == volume.classes == ["Cat", "dog", "empty", "loop"]
    assert len(folder) == 6 and "dog/again/z.jpeg" in found(folder)  # no file through a circle


def test_large_photos_are_decoded_smaller_only_if_asked(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "large.jpg", size=(800, 640))
    for kind in (ImageFolder, VolumeDataset):
        for shrink_to, shape in ((None, (3, 640, 800)), (100, (3, 160, 200)), (700, (3, 640, 800))):
            assert tuple(kind(tmp_path, shrink_to=shrink_to)[0][0].shape) == shape
        for wrong in (0, True, "big"):
            with pytest.raises(ConfigError, match=r"shrink_to=.* must be a number of pixels"):
                kind(tmp_path, shrink_to=wrong)
    with pytest.raises(ConfigError, match="shrink_to=100 is for images, and decode=None makes none"):
        VolumeDataset(tmp_path, decode=None, shrink_to=100)


def test_a_sample_is_a_uint8_tensor_that_a_transform_may_change(root: Path) -> None:
    image, label = ImageFolder(root)[0]
    assert (image.dtype, tuple(image.shape), type(label)) == (torch.uint8, (3, 8, 12), int)
    assert ImageFolder(root, transform=lambda tensor: tensor.shape)[0] == ((3, 8, 12), 0)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "RGBA", "P", "LA"])
def test_every_kind_of_picture_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("p.jpg" if mode == "CMYK" else "p.png")
    picture(path, 77, mode)
    image = read_image(path)
    assert tuple(image.shape) == (3, 8, 12)
    assert abs(image.float().mean().item() - 77) < 3


def test_sixteen_bits_and_turned_pictures_are_read_as_a_viewer_shows_them(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 6), 200 * 257, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png").unique().tolist() == [200]
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (12, 8)).save(tmp_path / "turned.jpg", exif=exif)
    assert tuple(read_image(tmp_path / "turned.jpg").shape) == (3, 12, 8)


@pytest.mark.parametrize("ending", ["jpg", "png"])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.95])
def test_a_damaged_file_is_named_with_its_full_path(tmp_path: Path, ending: str, part: float) -> None:
    path = tmp_path / "cat" / f"broken.{ending}"
    path.parent.mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(DataError, match=str(path)):
        ImageFolder(tmp_path)[0]


def test_a_missing_or_empty_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path / 'nowhere'} is no folder"):
        ImageFolder(tmp_path / "nowhere")
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=f"{tmp_path} holds 1 class folders and no image"):
        ImageFolder(tmp_path)


def test_a_file_that_vanished_is_named(root: Path) -> None:
    folder = ImageFolder(root)
    os.remove(root / "dog" / "b.jpg")
    with pytest.raises(DataError, match=r"dog/b\.jpg cannot be read: No such file"):
        folder[2]
    with pytest.raises(IndexError, match="no image 4 among the 4"):
        folder[4]


def test_digits_are_written_once_completely_and_alike(tmp_path: Path) -> None:
    roots: list[Path] = []
    threads = [threading.Thread(target=lambda: roots.append(digits_root(tmp_path / "cache"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    while not (found := list(tmp_path.glob("cache/digits*"))) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sum(1 for _ in found[0].glob("*/*/*.jpg")) == 1797  # from the first moment on
    for thread in threads:
        thread.join()
    assert len(roots) == 3 and len(set(roots)) == 1
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [roots[0].name]  # nothing half-written left
    train, val = ImageFolder(roots[0] / "train"), ImageFolder(roots[0] / "val")
    assert (len(train), len(val)) == (1442, 355)
    assert train.classes == val.classes == [str(digit) for digit in range(10)]
    assert not {train.sample_key(i) for i in range(len(train))} & {val.sample_key(i) for i in range(len(val))}
    assert tuple(train[0][0].shape) == (3, 32, 32)
    for folder in (train, val):
        counts = np.bincount([int(folder.sample_key(i).split("/")[0]) for i in range(len(folder))])
        assert counts.max() - counts.min() <= 10
    before = (roots[0] / "train").stat().st_mtime_ns
    assert digits_root(tmp_path / "cache") == roots[0]
    assert (roots[0] / "train").stat().st_mtime_ns == before
