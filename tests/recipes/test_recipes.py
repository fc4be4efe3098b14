"""The built-in recipes train, and what a user subclasses works as it says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from framework.data import ImageFolder, VolumeDataset
from framework.errors import BuildError, ConfigError, DataError
from framework.recipe import Recipe, StepOutput
from recipes import imagenet_resnet, toy
from tests.loop.runs import Crash, assert_same, by_step, core, events, fit, flat, make


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An image folder of two classes, red and blue, in the layout of ImageNet."""
    root = tmp_path / "images"
    noise = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 6)):
        for channel, name in ((0, "red"), (2, "blue")):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 60, (40, 48, 3), dtype=np.uint8)
                pixels[:, :, channel] += 180
                Image.fromarray(pixels).save(root / part / name / f"{number}.jpg")
    return root


def small_net() -> nn.Module:
    """With BatchNorm like a ResNet, and quick."""
    layers = [nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def small_resnet() -> nn.Module:
    return imagenet_resnet.resnet(depth=18, num_classes=2, small_images=True)


def resnet(root: Path) -> imagenet_resnet.ImageNetResNet:
    return imagenet_resnet.ImageNetResNet(
        model=small_net,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        train_data=partial(imagenet_resnet.train_images, str(root), size=16, scale=(0.5, 1.0)),
        eval_data=partial(imagenet_resnet.eval_images, str(root), size=16, resize=16),
    )


def test_the_image_recipe_learns_and_resumes_bit_for_bit(images: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 12, "eval_every": 6}
    whole = fit(tmp_path / "whole", resnet(images), core(every=3), **options)
    with pytest.raises(RuntimeError):
        make(tmp_path / "cut", resnet(images), core(every=3, crash=Crash(8)), **options).fit()
    cut = fit(tmp_path / "cut", resnet(images), core(every=3), **options)
    assert_same(flat(whole), flat(cut))
    assert by_step(tmp_path / "whole") == by_step(tmp_path / "cut")
    last = events(tmp_path / "whole", "metrics")[-1]["values"]
    assert set(last) == {"eval/loss", "eval/top1"} and last["eval/top1"] > 0.9
    losses = by_step(tmp_path / "whole")
    assert losses[12] < losses[1]


def test_images_are_normalised_on_the_device_from_bytes(images: Path) -> None:
    recipe = resnet(images)
    image, label = recipe.build_train_data()[0]
    assert image.dtype == torch.uint8 and image.shape == (3, 16, 16) and label in (0, 1)
    batch = torch.stack([torch.zeros(3, 4, 4, dtype=torch.uint8), torch.full((3, 4, 4), 255, dtype=torch.uint8)])
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (imagenet_resnet.MEAN, imagenet_resnet.STD))
    torch.testing.assert_close(recipe._normalised(batch), (batch.float() / 255 - mean) / std)


def test_a_url_gives_the_samples_of_the_folder_with_the_same_numbers_and_keys(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for make_data in (imagenet_resnet.train_images, imagenet_resnet.eval_images):
        folder, volume = make_data(str(images), size=16), make_data(f"{images.as_uri()}/", size=16)
        assert isinstance(folder, ImageFolder) and isinstance(volume, VolumeDataset)
        assert len(folder) == len(volume)
        for index in range(len(folder)):
            assert folder.sample_key(index) == volume.sample_key(index)
            (one, label), (other, same) = [[torch.manual_seed(0), data[index]][1] for data in (folder, volume)]
            assert torch.equal(one, other) and label == same
    small = imagenet_resnet.eval_images(str(images), size=16, resize=16, shrink_to=16)
    assert small.shrink_to == 16 and small[0][0].shape == (3, 16, 16)


def test_depths_that_do_not_exist_and_folders_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.depth=20: there are ResNets of depth 18, 34, 50, 101, 152"):
        imagenet_resnet.resnet(depth=20)
    with pytest.raises(DataError, match=r"nowhere/train"):
        imagenet_resnet.train_images(str(tmp_path / "nowhere"))


def test_a_resnet_for_small_images_keeps_their_resolution() -> None:
    small = small_resnet()
    assert isinstance(small.maxpool, nn.Identity) and small.conv1.stride == (1, 1)  # type: ignore[union-attr]
    assert small(torch.zeros(2, 3, 16, 16)).shape == (2, 2)


def toy_recipe(**options: Any) -> toy.Toy:
    return toy.Toy(
        model=toy.mlp,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        train_data=partial(toy.Samples, 320),
        eval_data=partial(toy.Samples, 80, 960, 0.0),
        **options,
    )


def test_the_toy_learns(tmp_path: Path) -> None:
    fit(tmp_path, toy_recipe(), {}, max_steps=None, max_epochs=4, global_batch_size=32, eval_every="1epochs")
    scores = [event["values"]["eval/top1"] for event in events(tmp_path, "metrics")]
    assert len(scores) == 4 and scores[-1] > 0.6 and scores[-1] > scores[0]


def test_a_toy_sample_is_a_function_of_its_id() -> None:
    data, shifted = toy.Samples(20, noise=0.0), toy.Samples(10, offset=10, noise=0.0)
    for index in range(10):
        left, right = data[index + 10], shifted[index]
        assert torch.equal(left["x"], right["x"]) and (left["y"], left["id"]) == (right["y"], right["id"])
    assert len({sample["y"] for sample in (toy.Samples(64)[i] for i in range(64))}) == toy.CLASSES


class Minimal(Recipe):
    """All that a recipe needs, with everything built by its own methods."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def build_train_data(self) -> Any:
        return [torch.tensor([float(i), 1.0]) for i in range(16)]

    def train_step(self, model: nn.Module, batch: torch.Tensor) -> StepOutput:
        return StepOutput(model(batch).square().mean(), metrics={"mean": batch.mean()})


def test_a_recipe_of_methods_alone_trains_and_its_metrics_are_logged(tmp_path: Path) -> None:
    fit(tmp_path, Minimal(), {}, max_steps=3)
    (steps,) = events(tmp_path, "steps")
    assert len(steps["loss"]) == 3 and len(steps["metrics"]["mean"]) == 3


def test_what_was_not_given_is_named() -> None:
    for build, key in ((Recipe().build_model, "model"), (Recipe().build_train_data, "data.train")):
        with pytest.raises(ConfigError, match=f"Recipe was given no {key}. Set {key}._target_, or override the method"):
            build()
    with pytest.raises(NotImplementedError, match=r"Recipe must override train_step\(model, batch\)"):
        Recipe().train_step(nn.Linear(1, 1), None)
    with pytest.raises(NotImplementedError, match="must override eval_step"):
        Recipe().eval_step(nn.Linear(1, 1), None)


def test_a_model_that_cannot_be_built_is_on_record_as_a_failed_run(tmp_path: Path) -> None:
    class Fails(Minimal):
        def build_model(self) -> nn.Module:
            raise BuildError("model: no such weights")

    with pytest.raises(BuildError):
        make(tmp_path, Fails()).fit()
    assert [event["ev"] for event in events(tmp_path)] == ["attempt_start", "failure", "end"]
    assert events(tmp_path, "end")[0]["status"] == "failed"


def test_own_collate_and_generators_of_the_build_depend_on_the_seed(tmp_path: Path) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * 2

    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(len(weights) + 1)  # what was drawn before has no influence
        trainer = fit(tmp_path / name, Minimal(collate=collate), {}, max_steps=1, seed=seed)
        weights.append(flat(trainer)["model.weight"])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert events(tmp_path / "a", "steps")[0]["metrics"]["mean"][0] > 2
