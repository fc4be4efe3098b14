"""A JPEG job on a volume where every open takes 40 ms: plain PyTorch, this framework, and others, on the same images.

    python benchmarks/slow_volume.py [--files 800] [--epochs 3] [--json FILE]

The volume is a real FUSE mount that waits in each `open`. Every contender decodes the same JPEGs (500 x 375, about
60 kB) with torchvision, cuts out and flips at random (224 x 224) and trains a small convolutional network, two worker
processes each unless it says otherwise. Given is the wall clock of whole epochs, model included, and how long the loop
waited for data. litData reads the raw files; Mosaic streaming and webdataset read shards that were written from
them beforehand (not measured), which have fewer opens to wait for. Those that are not installed are left out.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.io
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.faultfs import FaultFS

from framework.data import DataLoader
from framework.data.files import VolumeDataset

OPEN_SECONDS = 0.04
BATCH, WORKERS, PREFETCH, CLASSES = 32, 2, 4, 8
TRANSFORM = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
RGB = torchvision.io.ImageReadMode.RGB.value


def decoded(data: bytes) -> torch.Tensor:
    """The augmented picture, uint8 `[3, 224, 224]`."""
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return TRANSFORM(torch.ops.image.decode_image(raw, RGB, True))  # type: ignore[no-any-return]


class Files(Dataset[Any]):
    """What everybody writes first."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted(str(path) for path in root.rglob("*.jpg"))
        self.classes = sorted({Path(path).parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = Path(self.paths[index])
        return decoded(path.read_bytes()), self.classes.index(path.parent.name)


class Job:
    """A small network, trained by one thread."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, CLASSES),
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def epoch(self, batches: Iterable[Any], samples: int) -> tuple[float, float]:
        """Wall clock and waiting for data, in seconds."""
        began, waited, seen = time.perf_counter(), 0.0, 0
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(iterator, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            images, labels = batch
            seen += len(images)
            loss = nn.functional.cross_entropy(self.model(images.float().div(255)), torch.as_tensor(labels))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        assert abs(seen - samples) <= BATCH, f"{seen} of {samples} samples"
        return time.perf_counter() - began, waited


def make_images(folder: Path, count: int) -> None:
    """Realistic photos: random cuts out of two, so that no two files are alike."""
    photos = load_sample_images().images
    drawn = np.random.default_rng(0)
    for number in range(count):
        photo = Image.fromarray(photos[number % 2])
        left, top = drawn.integers(0, 140), drawn.integers(0, 50)
        target = folder / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + 500, top + 375)).save(target, quality=90)


# -- the contenders: each gives a fresh iterable of batches for every epoch --------------------------------------------

Epochs = Iterator[Iterable[Any]]


def plain(root: Path, **options: Any) -> Epochs:
    loader = StockLoader(Files(root), BATCH, shuffle=True, **options)
    while True:
        yield loader


def ours(root: Path, cache: Any) -> Epochs:
    dataset = VolumeDataset(root, transform=TRANSFORM, cache=cache)
    loader = DataLoader(dataset, BATCH, num_workers=WORKERS, prefetch_factor=PREFETCH)
    try:
        while True:
            yield loader
    finally:
        loader.close()


def litdata_raw(root: Path, work: Path) -> Epochs:
    from litdata.raw import StreamingRawDataset

    class Raw(StreamingRawDataset):  # type: ignore[misc]
        def setup(self, files: Any) -> Any:
            return [file for file in files if file.path.endswith(".jpg")]

    dataset = Raw(
        str(root), cache_dir=str(work / "litdata"), cache_files=True, transform=lambda data: (decoded(data), 0)
    )
    loader = StockLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, prefetch_factor=PREFETCH, persistent_workers=True
    )
    while True:
        yield loader


def mosaic(volume: Path, local: Path, work: Path) -> Epochs:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    target = local / "mds"
    with MDSWriter(out=str(target), columns={"data": "bytes", "label": "int"}, size_limit=8 << 20) as writer:
        files = Files(local)
        for path in files.paths:
            writer.write({"data": Path(path).read_bytes(), "label": files.classes.index(Path(path).parent.name)})

    class Shards(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return decoded(sample["data"]), sample["label"]

    dataset = Shards(remote=str(volume / "mds"), local=str(work / "mosaic"), shuffle=True, batch_size=BATCH)
    loader = StockLoader(dataset, BATCH, num_workers=WORKERS, prefetch_factor=PREFETCH, persistent_workers=True)
    while True:
        yield loader


def web(volume: Path, local: Path) -> Epochs:
    import tarfile

    import webdataset

    (local / "wds").mkdir()
    files = Files(local)
    for shard in range(8):
        with tarfile.open(local / "wds" / f"{shard:03d}.tar", "w") as tar:
            for path in files.paths[shard::8]:
                name = f"{Path(path).stem}"
                label = str(files.classes.index(Path(path).parent.name)).encode()
                tar.add(path, f"{name}.jpg")
                info = tarfile.TarInfo(f"{name}.cls")
                info.size = len(label)
                tar.addfile(info, io.BytesIO(label))
    urls = str(volume / "wds" / "{000..007}.tar")
    dataset = webdataset.WebDataset(urls, shardshuffle=8, workersplitter=webdataset.split_by_worker).shuffle(200)
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(decoded, int).batched(BATCH, partial=True)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS, prefetch_factor=PREFETCH)
    while True:
        yield loader


def run(name: str, make: Callable[[], Epochs], epochs: int, samples: int, rows: list[dict[str, Any]]) -> None:
    """Trains some epochs and prints a line for each."""
    try:
        loaders = make()
        job = Job()
        for epoch in range(1, epochs + 1):
            wall, waited = job.epoch(next(loaders), samples)
            rows.append({"way": name, "epoch": epoch, "seconds": wall, "waited": waited})
            print(f"{name:<44}{epoch:>6}{wall:>10.2f} s{samples / wall:>9.0f}/s{waited / wall:>9.0%}", flush=True)
        loaders.close()  # type: ignore[attr-defined]
    except ImportError as error:
        print(f"{name:<44}  left out: {error}")
    except Exception as error:
        print(f"{name:<44}  failed: {type(error).__name__}: {str(error)[:120]}")


def verdict(rows: list[dict[str, Any]]) -> None:
    """Ours against the better plain one, local disk, and the raw files of others."""

    def seconds(way: str, epoch: int) -> float:
        return next(row["seconds"] for row in rows if row["way"].startswith(way) and row["epoch"] == epoch)

    best = min(row["seconds"] for row in rows if row["way"].startswith("plain") and row["epoch"] == 1)
    last = max(row["epoch"] for row in rows if row["way"].startswith("ours, volume"))
    disk = min(seconds("ours, local", epoch) for epoch in range(1, last + 1))
    later = min(seconds("ours, volume", epoch) for epoch in range(2, last + 1))
    print(f"\nours in epoch 1: {1 - seconds('ours, volume', 1) / best:.0%} less than the better plain one")
    print(f"ours from epoch 2 on: {later / disk - 1:+.1%} against local disk (best of the epochs of each)")
    if any(row["way"].startswith("litData") for row in rows):
        print(
            f"litData in epoch 1 takes {seconds('litData', 1) / seconds('ours, volume', 1):.1f} times as long as ours"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="slow-volume-"))
    volume = FaultFS(work / "mount")
    rows: list[dict[str, Any]] = []
    try:
        make_images(volume.backing / "images", arguments.files)
        volume.delay(OPEN_SECONDS, "open")
        slow, fast = volume.path / "images", volume.backing / "images"
        print(f"{'way':<44}{'epoch':>6}{'wall clock':>12}{'images':>11}{'waited':>9}")
        settings = {"num_workers": WORKERS, "prefetch_factor": PREFETCH, "persistent_workers": True}
        ways: list[tuple[str, Callable[[], Epochs], int]] = [
            ("plain, volume, DataLoader's defaults", lambda: plain(slow), 1),
            ("plain, volume, 2 workers, prefetch 4", lambda: plain(slow, **settings), 1),
            ("ours, volume", lambda: ours(slow, {"root": str(work / "cache"), "min_free": "1%"}), arguments.epochs),
            ("ours, local disk", lambda: ours(fast, False), arguments.epochs),
            ("plain, local disk, 2 workers, prefetch 4", lambda: plain(fast, **settings), arguments.epochs),
            ("litData, raw files on the volume", lambda: litdata_raw(slow, work), 2),
            ("Mosaic streaming, shards on the volume", lambda: mosaic(slow, fast, work), 2),
            ("webdataset, shards on the volume", lambda: web(slow, fast), 2),
        ]
        for name, make, epochs in ways:
            run(name, make, epochs, arguments.files, rows)
        verdict([row for row in rows if not row["way"].startswith("plain, local")])
    finally:
        volume.close()
        shutil.rmtree(work, ignore_errors=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    os._exit(0)  # some of the others leave threads that never end


if __name__ == "__main__":
    main()
