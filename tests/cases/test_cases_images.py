"""Images: IM-01, IM-04, IM-06, IM-08, and CL-15, CL-23, PF-03 for samples that have an index."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_tools import MLFLOW, PARTS, mlflow_runs, part, tree
from image_tools import AUDIT, KINDS, audited, job, picture
from PIL import Image
from support import committed_steps, events, kept, kill_at, start
from support.processes import Run
from test_cases_hydra import images as cats_and_dogs
from test_cases_hydra import opened

from framework.data import ImageFolder, VolumeDataset
from framework.data.__main__ import main as data_command


def damage(path: Path) -> Path:
    """Cuts a file in its middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def folder_of(root: Path, damaged: tuple[str, ...] = ()) -> Path:
    """24 images in the classes a, b and c, of which some are cut."""
    for number in range(24):
        path = picture(root / "abc"[number % 3] / f"{number:02d}.jpg", 10 * number, (64, 64))
        if path.name in damaged:
            damage(path)
    return root


BROKEN: dict[str, Callable[[Path], object]] = {
    "cut.jpg": lambda path: damage(picture(path, size=(64, 64))),
    "text.jpg": lambda path: path.write_text("no image at all"),
    "empty.png": lambda path: path.write_bytes(b""),
    "a b ü\n.JPG": lambda path: path.write_bytes(b"\xff\xd8\xff, and nothing more"),
}


@pytest.mark.parametrize(
    ("kind", "workers", "names"),
    [
        ("folder", 0, ["cut.jpg", "empty.png"]),
        ("folder", 2, ["text.jpg", "empty.png"]),
        ("volume", 0, ["text.jpg"]),
        ("volume", 2, ["cut.jpg", "a b ü\n.JPG"]),
    ],
)
def test_im_01_a_damaged_image_is_named_with_its_path(
    kind: str, workers: int, names: list[str], tmp_path: Path
) -> None:
    """A damaged image kills training with an error that does not say which file."""
    for name in names:
        root = tmp_path / name.split(".")[0]
        BROKEN[name](folder_of(root / "data") / "b" / name)
        run = start(*job(kind, root / "data", f"loader.num_workers={workers}", "trainer.max_steps=8"), cwd=root).ends(1)
        said = run.stderr()
        assert f"{root / 'data/b' / name}" in said, said
        assert not workers or re.search(r"worker \d of 2", said), said
        assert not committed_steps(root / "runs/r")


def test_im_01_files_without_a_byte_are_left_out_of_a_volume_and_named(tmp_path: Path) -> None:
    """An empty file ends the run in the middle, or is left out without a word."""
    (folder_of(tmp_path / "data") / "b/empty.png").touch()
    run = start(*job("volume", tmp_path / "data", "loader.num_workers=0"), cwd=tmp_path).ends(0)
    assert "24 files" in run.output() and "1 empty, 0 bytes ('b/empty.png')" in run.output()


def test_im_01_the_rank_is_said_too(tmp_path: Path) -> None:
    """A damaged image kills training on many ranks with an error that does not say where."""
    root = folder_of(tmp_path / "data", tuple(f"{number:02d}.jpg" for number in range(24)))
    run = start(*job("folder", root, "loader.num_workers=1"), cwd=tmp_path, ranks=2)
    assert 1 in run.wait()
    said = [run.stderr(rank) for rank in range(2)]
    assert all("worker 0" in text and str(root) in text for text in said), said
    assert "[rank 1]" in said[1]


def skipping(tmp_path: Path, kind: str, on_error: str, *words: str) -> tuple[Run, Path, tuple[str, ...]]:
    damaged = ("03.jpg", "10.jpg", "17.jpg")
    root = folder_of(tmp_path / "data", damaged)
    command = job(kind, root, f"loader.on_error={on_error}", AUDIT, "trainer.max_steps=12", *words)
    return start(*command, cwd=tmp_path).ends(0), tmp_path / "runs/r", damaged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_im_01_damaged_images_are_passed_over_named_and_counted(
    kind: str, on_error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no way to go on without a damaged image, or nobody hears of it."""
    run, folder, damaged = skipping(tmp_path, kind, on_error, "loader.num_workers=2", part("Sizes"))
    for name in damaged:
        (line,) = [line for line in run.stderr().splitlines() if "takes its place" in line and name in line]
        assert f"{tmp_path / 'data'}/{'abc'[int(name[:2]) % 3]}/{name}" in line and "WARNING" in line
    counted = sum(event["skipped"] for event in events(folder, "data"))
    assert counted == 6  # in each of two epochs
    assert json.loads((folder / "sizes").read_text()) == [4] * 12
    result = audited(folder, 24, 2)
    assert [len(each.damaged) for each in result.epochs] == [3, 3]
    assert data_command(["audit", str(folder)]) == 0
    assert "could not be loaded, so not trained: ids" in capsys.readouterr().out
    from framework.goodput.__main__ import main as goodput_command

    assert goodput_command(["report", str(folder)]) == 0
    assert "6 samples could not be loaded" in capsys.readouterr().out


def test_im_01_a_run_that_passes_over_images_resumes_at_the_same_sample(tmp_path: Path) -> None:
    """The position drifts where samples are left out."""
    damaged = ("03.jpg", "10.jpg", "17.jpg")
    root = folder_of(tmp_path / "data", damaged)
    words = job("volume", root, "loader.on_error=skip", AUDIT, "trainer.max_steps=18", part("Synchronous"))
    words = (*words, "callbacks.async_checkpoint.every=2", kill_at(8, "forward"), "loader.num_workers=1")
    start(*words, cwd=tmp_path).crashed()
    start(*words, cwd=tmp_path).ends(0)
    result = audited(tmp_path / "runs/r", 24, 3)
    assert result.attempts == 2 and [len(each.damaged) for each in result.epochs] == [3, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_im_01_evaluation_leaves_damaged_images_out(kind: str, tmp_path: Path) -> None:
    """A damaged image in the evaluation set ends the run at the end of an epoch."""
    root = folder_of(tmp_path / "data")
    other = folder_of(tmp_path / "eval", ("05.jpg",))
    words = ("trainer.eval_every=3", "loader.num_workers=0", "trainer.max_steps=3")
    run = start(*job(kind, root, *words, evaluation=other), cwd=tmp_path).ends(1)
    assert f"{other}/c/05.jpg" in run.stderr()
    words = (*words, "run.name=s", "loader.on_error=skip")
    run = start(*job(kind, root, *words, evaluation=other), cwd=tmp_path).ends(0)
    assert f"{other}/c/05.jpg" in run.stderr() and "left out (loader.on_error)" in run.stderr()


@pytest.mark.parametrize("kind", KINDS)
def test_im_04_an_empty_class_folder_keeps_its_number(kind: str, tmp_path: Path) -> None:
    """An empty class folder stops the run with an unclear error or is dropped so that labels shift."""
    for name in ("a", "c"):
        picture(tmp_path / "data" / name / "1.png")
    (tmp_path / "data/b").mkdir()
    data: Any = {"folder": ImageFolder, "volume": VolumeDataset}[kind](tmp_path / "data")
    assert data.classes == ["a", "b", "c"] and [label for _, label in (data[0], data[1])] == [0, 2]
    words = ("loader.num_workers=0", "trainer.max_steps=2", "trainer.global_batch_size=2")
    start(*job(kind, tmp_path / "data", *words), cwd=tmp_path).ends(0)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def every_kind(root: Path) -> dict[str, tuple[int, int]]:
    """Writes one file of each kind; returns their sizes (height, width) as they are to be seen."""
    image = Image.new("RGB", (12, 8), (200, 100, 50))
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {f"{mode}.png": (encoded(image.convert(mode)), (8, 12)) for mode in ("L", "LA", "RGBA", "P")}
    files |= {
        "cmyk.jpg": (encoded(image.convert("CMYK"), "JPEG"), (8, 12)),
        "16 bits.png": (encoded(Image.fromarray(np.full((8, 12), 40_000, dtype=np.uint16))), (8, 12)),
        "one.png": (encoded(image.resize((1, 1))), (1, 1)),
        "X.JPEG": (encoded(image, "JPEG"), (8, 12)),
        "ü b\n.png": (encoded(image), (8, 12)),
        "turned.jpg": (encoded(image, "JPEG", exif=exif), (12, 8)),
    }
    (root / "class").mkdir(parents=True)
    for name, (data, _) in files.items():
        (root / "class" / name).write_bytes(data)
    return {f"class/{name}": size for name, (_, size) in files.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_im_06_every_kind_of_image_is_loaded_as_rgb(kind: str, tmp_path: Path) -> None:
    """Grey, alpha, palette, CMYK, 16-bit or upper-case-extension files crash collate or are ignored."""
    sizes = every_kind(tmp_path / "data")
    data: Any = {"folder": ImageFolder, "volume": VolumeDataset}[kind](tmp_path / "data")
    found = {data.sample_key(index): data[index][0] for index in range(len(data))}
    assert {name: tuple(image.shape) for name, image in found.items()} == {
        name: (3, *size) for name, size in sizes.items()
    }
    assert all(image.dtype == torch.uint8 for image in found.values())
    assert found["class/16 bits.png"].unique().tolist() == [round(40_000 * 255 / 65_535)]
    words = ("loader.num_workers=1", "trainer.global_batch_size=10", "trainer.max_steps=2", AUDIT)
    start(*job(kind, tmp_path / "data", *words), cwd=tmp_path).ends(0)
    audited(tmp_path / "runs/r", 10, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_im_06_links_in_a_circle_and_odd_names_train_once_each(kind: str, tmp_path: Path) -> None:
    """A loop of links or a name that is no text hangs or ends the listing."""
    root = tmp_path / "my data, (1)"
    names = ["a b.png", "é.png", "e\u0301.png", "line\nbreak.png", "'quoted\".png", "-.png", os.fsdecode(b"\xff.png")]
    for name in names:
        picture(root / "cat" / name)
    picture(root / "dog" / "deep" / "er" / "x.PNG")
    (root / "dog" / "up").symlink_to(root)
    (root / "dog" / "self.png").symlink_to("self.png")
    (root / "dog" / "gone.png").symlink_to("nowhere.png")
    (root / "cat" / ".DS_Store").write_text("x")
    words = (AUDIT, "loader.num_workers=1", "trainer.max_steps=4")
    if kind == "folder":
        (root / "dog" / "self.png").unlink(), (root / "dog" / "gone.png").unlink()
    run = start(*job(kind, root, *words), cwd=tmp_path).ends(0)
    audited(tmp_path / "runs/r", 8, 2)
    assert kind == "folder" or "2 broken or circular links" in run.output() or "3 broken" in run.output()


@pytest.mark.parametrize(
    ("kind", "ranks", "samples", "batch", "length"),
    [("folder", 1, 3, 8, "max_steps"), ("volume", 1, 3, 8, "max_epochs"), ("folder", 2, 9, 16, "max_epochs")],
)
def test_im_08_fewer_samples_than_a_batch_are_refused_with_both_numbers(
    kind: str, ranks: int, samples: int, batch: int, length: str, tmp_path: Path
) -> None:
    """Training 'succeeds' with 0 steps or loops for ever on max_steps."""
    for number in range(samples):
        picture(tmp_path / "data/a" / f"{number}.png")
    words = (*job(kind, tmp_path / "data", f"trainer.global_batch_size={batch}"), "loader.epoch_end=drop")
    if length == "max_epochs":
        words = (*words, "trainer.max_steps=null", "trainer.max_epochs=5")
    run = start(*words, cwd=tmp_path, ranks=ranks)
    assert run.wait(60) == [1] * ranks
    said = run.stderr()
    assert f"{samples} samples" in said and str(batch) in said and "drop" in said, said
    assert not committed_steps(tmp_path / "runs/r")


def test_cl_15_the_directory_that_was_typed_is_opened(tmp_path: Path, with_store: Callable[[Path], Path]) -> None:
    """A path with spaces, brackets or commas is another one after the command line."""
    name = "my images/it(1),v2 a=b{c}[d]"
    files, runs = cats_and_dogs(tmp_path / name), with_store(tmp_path)
    words = (
        "+recipe=job", f'+data.root="{name}"', "~data.eval", "~data.train.samples", "~callbacks.ids", "run.name=r",
        f"data.train={{_target_: {PARTS}.pictures, root: '${{data.root}}'}}", "trainer.max_steps=4", MLFLOW,
        "callbacks.async_checkpoint.every=1", part("Synchronous"),
    )  # fmt: skip
    env = {"OPENED": str(tmp_path / "opened")}
    start(*words, kill_at(3, "forward"), cwd=tmp_path, env=env).crashed()
    start(*words, cwd=tmp_path, env=env).ends(0)
    assert opened(tmp_path) == files
    assert [event["step"] for event in events(runs / "r", "restored")] == [2]
    assert mlflow_runs(runs)["r"][0].params["data.root"] == name


@pytest.mark.parametrize("kind", KINDS)
def test_cl_23_a_relative_folder_is_that_of_the_launch(kind: str, tmp_path: Path) -> None:
    """With hydra.job.chdir another folder is read, or none."""
    folder_of(tmp_path / "data")
    words = job(kind, Path("data"), "hydra.job.chdir=True", AUDIT, "loader.num_workers=1")
    start(*words, cwd=tmp_path).ends(0)
    audited(tmp_path / "runs/r", 24, 1)
    assert {path.split("/")[0] for path in tree(tmp_path)} == {"data", "runs"}


def test_pf_03_a_resume_loads_nothing_again(tmp_path: Path) -> None:
    """Resume loads and throws away all earlier batches; hours of waiting."""
    log = tmp_path / "made"
    words = (
        "+recipe=job", f"data.train={{_target_: {PARTS}.SlowSamples, samples: 1000, log: {log}}}", "trainer.max_steps=125",
        "trainer.eval_every=null", "callbacks.async_checkpoint.every=10", part("Synchronous"), "run.name=r",
    )  # fmt: skip
    start(*words, kill_at(111, "forward"), cwd=tmp_path).crashed()
    log.unlink()
    began = time.time()
    start(*words, "+data.train.seconds=0.05", cwd=tmp_path).ends(0)
    run = tmp_path / "runs/r"
    assert [event["step"] for event in events(run, "restored")] == [110]
    first = float(log.read_text().split(maxsplit=1)[0])
    made = [int(line.split()[1]) for line in log.read_text().splitlines()]
    history = kept(run)
    assert made[:120] == [number for step in range(111, 126) for number in history[step].ids]
    assert first - began < 60 and len(made) <= 120 + 8  # nothing of what was trained is made again
    assert sorted(number for line in history.values() for number in line.ids) == list(range(1000))
