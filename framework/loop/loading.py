"""From a recipe's training data to the loader of a run: which strategy keeps its place, and why not another one.

Guarantee: a strategy is chosen by what the dataset can do, never by what it is called; one that was asked for and cannot
be kept is refused with the reason. Nothing is loaded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from framework.checkpoint import CheckpointReader, CheckpointStore
from framework.data import DataLoader
from framework.data.device import DeviceBatches
from framework.data.files.paths import with_index
from framework.data.order import SPEC
from framework.data.streams.loader import EPOCH, FAST_FORWARD, SHARDS, STATEFUL, StreamLoader
from framework.data.streams.protocol import MergeableStream
from framework.data.streams.sequential import SequentialSource
from framework.distributed import World
from framework.duration import ENDLESS, EPOCHS, STEPS, Duration
from framework.errors import ConfigError, DataError, FrameworkError, suggest
from framework.settings import LoaderSettings, TrainerSettings

if TYPE_CHECKING:
    from framework.trainer import Trainer

AUTO, OFFSET = "auto", "offset"
AS_READ = "as it is read"  # of an order that is the dataset's own
SAMPLES, OWN = "samples", "own"  # of `loader.split`
_MEANING = {
    OFFSET: "one integer, found again at once",
    SHARDS: "what is done of each shard, which other ranks and workers can take over",
    STATEFUL: "the dataset's own state in each rank and worker, of which there must be as many again",
    EPOCH: "checkpoints at the ends of epochs only",
    FAST_FORWARD: "a resume reads the epoch again up to where it was, with as many ranks and workers",
}


@dataclass(frozen=True, slots=True)
class TrainData:
    """Training data, and how its place is kept.

    Args:
        dataset: What the loader reads from.
        strategy: `offset`, `shards`, `stateful`, `epoch` or `fast-forward`.
        samples: Samples of an epoch over all ranks, or `ENDLESS` where nobody knows.
        is_stream: Whether the samples have no index.
        how: How it is kept, in words.
        order: Where the order of the samples comes from: a place in one is none in another.
        sampler: Somebody else's sampler that gives it, if any.
    """

    dataset: Any
    strategy: str
    samples: int
    is_stream: bool
    how: str
    order: str = AS_READ
    sampler: Any = None

    @property
    def is_numbered_by_readers(self) -> bool:
        """Whether a sample is known only by the reader that gave it, and by its number there."""
        return self.is_stream and self.strategy != SHARDS

    @property
    def known_samples(self) -> int | None:
        """Samples of an epoch, or none where nobody knows."""
        return None if self.samples >= ENDLESS else self.samples


def adopt_saved(trainer: Trainer, dataset: Any) -> None:
    """Lets a dataset that goes on with the list of its files as it was take that from the newest checkpoint.

    Before anything depends on its length; what is restored later is compared again. All ranks do it together.
    """
    files = with_index(dataset)
    if not getattr(getattr(files, "files", files), "is_frozen", False):
        return

    def read() -> Any:
        store = CheckpointStore(trainer.run.checkpoints)
        newest = store.newest()
        if newest is None or newest.header is None:
            return None
        shared = CheckpointReader(store, trainer.world, trainer.group).read_shared(newest)
        return next((one["data"] for one in shared["callbacks"].values() if "data" in one and "strategy" in one), None)

    saved = trainer.group.on_main(read)
    if saved is not None:
        files.check_data_state(saved)


def train_data(dataset: Any, sampler: Any, loader: LoaderSettings, seed: int) -> TrainData:
    """Chooses the strategy for a dataset.

    Args:
        dataset: What the recipe built.
        sampler: What it gives the order by, if anything.
        loader: How samples get to the model.
        seed: Of the run.

    Raises:
        ConfigError: `loader.position`, `loader.split` or another key asks for what this dataset cannot do.
        DataError: It is no dataset, or its length cannot be taken.
    """
    name = type(dataset).__name__
    if dataset is None:
        raise ConfigError("data.train: the factory returned None. It must return a dataset.")
    if loader.split not in (None, SAMPLES, OWN):
        raise ConfigError(
            f"loader.split={loader.split!r} is unknown. Use samples, own or null.{suggest(str(loader.split), (SAMPLES, OWN))}"
        )
    dataset = with_index(dataset)
    is_mergeable = isinstance(dataset, MergeableStream)
    if not is_mergeable and _has_index(dataset):
        _refuse_for_index(name, loader)
        chosen = EPOCH if loader.position == EPOCH else OFFSET
        order = SPEC if sampler is None else f"sampler {type(sampler).__name__}"
        return TrainData(dataset, chosen, length(dataset, "data.train"), False, _MEANING[chosen], order, sampler)
    if sampler is not None:
        raise ConfigError(
            f"{type(sampler).__name__}: a sampler gives the order of samples that have an index, and {name} is iterated "
            f"over. Leave the sampler out, or give the dataset __len__ and __getitem__."
        )
    if not is_mergeable and not isinstance(dataset, Iterable):
        raise DataError(
            f"data.train: {name} is no dataset: it has neither __len__ and __getitem__, nor __iter__. Give it the former, "
            f"with which any place in the data is found at once, or make it an IterableDataset."
        )
    samples = _stream_length(dataset, loader)
    if loader.split == SAMPLES:
        return _split_by_samples(dataset, name, samples, loader, seed, is_mergeable)
    strategy, how = _stream_strategy(dataset, name, loader.position, is_mergeable)
    if loader.on_error != "raise" and not is_mergeable:
        raise ConfigError(
            f"loader.on_error={loader.on_error}: {name} is iterated over, and after an error there is nothing to go on "
            f"with. Catch errors in its __iter__, or give it __len__ and __getitem__."
        )
    return TrainData(dataset, strategy, samples, True, how)


def check_epochs(data: TrainData, trainer: TrainerSettings, has_evaluation: bool) -> None:
    """Refuses lengths in epochs where nobody knows how long an epoch is, by key.

    Raises:
        ConfigError: There is one.
    """
    if data.samples < ENDLESS:
        return
    if trainer.max_epochs is not None:
        Duration(trainer.max_epochs, EPOCHS).check_length(data.samples, key="trainer.max_epochs")
    if has_evaluation and trainer.eval_every is not None:
        Duration.parse(trainer.eval_every, key="trainer.eval_every").check_length(
            data.samples, key="trainer.eval_every"
        )


def check_saves(callbacks: Mapping[str, Any], data: TrainData, global_batch_size: int) -> None:
    """Refuses saves within epochs where there can be none.

    Raises:
        ConfigError: An interval is shorter than an epoch.
    """
    for name, callback in callbacks.items():
        interval: Duration | None = getattr(callback, "interval", None)
        if interval is None or not hasattr(callback, "save"):
            continue
        key = f"callbacks.{name}.every"
        interval.check_length(data.samples, key=key)
        if data.strategy != EPOCH:
            continue
        in_steps = interval.unit == STEPS and interval.value * global_batch_size < data.samples
        in_epochs = interval.unit == EPOCHS and interval.value != int(interval.value)
        if in_steps or in_epochs:
            raise ConfigError(
                f"{key}={interval} asks for checkpoints within an epoch of {data.samples} samples, and with "
                f"loader.position=epoch there are none that a run could go on from. Set {key}=1epochs, or another "
                f"loader.position."
            )


def build_loader(
    data: TrainData, recipe: Any, trainer: TrainerSettings, loader: LoaderSettings, *, micro: int, seed: int,
    world: World, gather: Callable[[Any], list[Any]], options: Mapping[str, Any],
) -> DataLoader | StreamLoader:  # fmt: skip
    """The loader of a run.

    Args:
        data: From `train_data`.
        recipe: Its collate.
        trainer: Batch sizes.
        loader: How samples get to the model.
        micro: Samples of a micro-batch.
        seed: Of the run.
        world: This process among all.
        gather: Gives every rank's value to every rank.
        options: What all loaders of the run are given.
    """
    same: dict[str, Any] = {
        "global_batch_size": trainer.global_batch_size, "seed": seed, "rank": world.rank, "world_size": world.size,
        "epoch_end": loader.epoch_end, "collate_fn": recipe.collate_in_workers, **options,
    }  # fmt: skip
    if data.is_stream:
        return StreamLoader(
            data.dataset, micro, strategy=data.strategy, samples=data.samples, is_checked=loader.split != OWN,
            gather=gather, **same,
        )  # fmt: skip
    shuffle = False if isinstance(data.dataset, SequentialSource) else None
    made = DataLoader(
        data.dataset, micro, shuffle, sampler=data.sampler, endless=True, look_ahead=loader.look_ahead, **same
    )
    made.strategy = data.strategy
    return made


def on_device(batches: Iterator[Any], world: World, channels_last: bool) -> Iterator[Any]:
    """Batches on the device: on CUDA each is copied while the one before it is computed with."""
    return batches if world.device.type == "cpu" else DeviceBatches(batches, world.device, channels_last)


def length(dataset: Any, key: str) -> int:
    """Samples of a map-style dataset.

    Args:
        dataset: What the factory gave.
        key: Which one, for messages: `data.train`, `data.eval` or `data.eval.<set>`.

    Raises:
        ConfigError: There is none.
        DataError: It has no length, or that cannot be taken.
    """
    kind = type(dataset).__name__
    if dataset is None:
        raise ConfigError(f"{key}: the factory returned None. It must return a dataset with __len__ and __getitem__.")
    dataset = with_index(dataset)
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not hasattr(type(dataset), "__len__"):
        raise DataError(
            f"{key}: {kind} {'is iterated over' if is_stream else 'has no length'}. Evaluation needs a map-style dataset, "
            f"with __len__ and __getitem__, or one sample for each path of a VolumeDataset."
        )
    return _len(dataset, key)


def _len(dataset: Any, key: str) -> int:
    try:
        return len(dataset)
    except FrameworkError:
        raise
    except Exception as error:  # also where it is negative or no whole number
        raise DataError(
            f"{key}: the length of {type(dataset).__name__} cannot be taken: {type(error).__name__}: {error}. Its __len__ "
            f"must return a whole number of at least 0."
        ) from error


def _has_index(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return False
    kind = type(dataset)
    return hasattr(kind, "__len__") and (hasattr(kind, "__getitem__") or hasattr(kind, "fetch_many"))


def _refuse_for_index(name: str, loader: LoaderSettings) -> None:
    if loader.position in (SHARDS, STATEFUL):
        raise ConfigError(
            f"loader.position={loader.position}: {name} gives samples by their index, so that its place is one integer. "
            f"Use loader.position=offset (or auto), which goes on at any sample, with any ranks and workers."
        )
    if loader.split is not None:
        raise ConfigError(
            f"loader.split={loader.split} is for iterable datasets; {name} gives samples by their index, which are split "
            f"anyway. Leave it out."
        )
    if loader.samples_per_epoch is not None:
        raise ConfigError(
            f"loader.samples_per_epoch={loader.samples_per_epoch} is for iterable datasets; an epoch of {name} is its "
            f"length. Leave it out."
        )


def _stream_length(dataset: Any, loader: LoaderSettings) -> int:
    """Samples of an epoch; `loader.samples_per_epoch` is right where both are given."""
    if loader.samples_per_epoch is not None:
        return loader.samples_per_epoch
    if not hasattr(type(dataset), "__len__"):
        return ENDLESS
    try:
        len(dataset)
    except (TypeError, NotImplementedError):  # how a class says that this object has none
        return ENDLESS
    except Exception:
        pass
    return _len(dataset, "data.train")


def _split_by_samples(
    dataset: Any, name: str, samples: int, loader: LoaderSettings, seed: int, is_mergeable: bool
) -> TrainData:
    if is_mergeable:
        raise ConfigError(f"loader.split=samples: {name} is split over ranks and workers anyway. Leave it out.")
    if samples == ENDLESS:
        raise ConfigError(
            f"loader.split=samples: {name} has no __len__, and places in it are counted by epochs. Set "
            f"loader.samples_per_epoch."
        )
    if loader.position not in (AUTO, OFFSET, EPOCH):
        raise ConfigError(
            f"loader.position={loader.position} does not go with loader.split=samples, where the place is one integer. Use "
            f"loader.position=auto."
        )
    strategy = EPOCH if loader.position == EPOCH else OFFSET
    how = "one integer; every reader reads all of the stream, and again up to the sample after a resume"
    return TrainData(SequentialSource(dataset, samples, seed), strategy, samples, False, how)


def _stream_strategy(dataset: Any, name: str, position: str, is_mergeable: bool) -> tuple[str, str]:
    """The strategy of a stream, and what it means."""
    has_state = all(callable(getattr(dataset, method, None)) for method in ("state_dict", "load_state_dict"))
    chosen = position
    if position == AUTO:
        chosen = SHARDS if is_mergeable else STATEFUL if has_state else FAST_FORWARD
    if chosen == OFFSET:
        raise ConfigError(
            f"loader.position=offset: the samples of {name} have no index, it can only be iterated over. Give it __len__ "
            f"and __getitem__, use loader.position=auto, or loader.split=samples, which counts its samples."
        )
    if chosen == SHARDS and not is_mergeable:
        raise ConfigError(
            f"loader.position=shards: {name} is no stream of shards that can be cut anew. Use framework.data.ShardStream, "
            f"or loader.position=auto."
        )
    if chosen == STATEFUL and not has_state:
        raise ConfigError(
            f"loader.position=stateful: {name} has no state_dict and load_state_dict. Give it both, or use "
            f"loader.position=auto, which reads it again up to where it was."
        )
    if is_mergeable and chosen != SHARDS:
        raise ConfigError(f"loader.position={chosen}: {name} is cut by shards. Use loader.position=shards or auto.")
    return chosen, _MEANING[chosen]
