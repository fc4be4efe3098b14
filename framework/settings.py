"""The typed settings of a run, as plain dataclasses.

Guarantee: every key of the config groups `trainer`, `loader`, `run` and `parallel` is a field here, with its type and
its default; a component gets its settings from here and from nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainerSettings:
    """How long and how to train.

    Args:
        max_steps: Budget in optimizer steps.
        max_epochs: Budget in epochs, fractions allowed.
        max_time: Budget in training time over all attempts (`8h`), by rank 0's clock.
        global_batch_size: Samples per optimizer step over all ranks.
        micro_batch_size: Samples per forward pass and rank; default the whole share of a rank.
        eval_batch_size: Samples per forward pass in evaluation; default the micro-batch size.
        precision: `fp32`, `bf16` or `fp16` (autocast; fp16 with a loss scaler).
        clip_norm: Largest gradient norm, or none.
        eval_every: A duration in steps or epochs, or none.
        eval_at_end: Whether the last step is evaluated too.
        deterministic: Deterministic kernels; default on CPU, off on CUDA.
        compile: `true`, or a mapping of options of `torch.compile`.
        channels_last: Memory format of 4-dimensional parameters and inputs.
        ema_decay: Decay of an exponential moving average of the weights, or none. Evaluation uses the average.
        num_threads: Threads of torch inside one process; default torch's own.
        device: `auto`, `cpu` or `cuda`.
        timeout: Longest wait of one rank for another, as a duration.
    """

    max_steps: int | None = None
    max_epochs: float | None = None
    max_time: str | None = None
    global_batch_size: int = 32
    micro_batch_size: int | None = None
    eval_batch_size: int | None = None
    precision: str = "fp32"
    clip_norm: float | None = None
    eval_every: str | None = "1epochs"
    eval_at_end: bool = True
    deterministic: bool | None = None
    compile: Any = False
    channels_last: bool = False
    ema_decay: float | None = None
    num_threads: int | None = None
    device: str = "auto"
    timeout: str = "10min"


@dataclass
class LoaderSettings:
    """How samples get to the model.

    Args:
        num_workers: Loader processes per rank; default from the CPU count, 0 loads in the main process.
        position: The strategy that makes the position resumable: `offset`, `shards`, `stateful` or `epoch`; default by
            the kind of the dataset.
        split: `samples`: an iterable dataset that does not split itself over ranks and workers is read by all of them,
            and each takes its share of the samples. `own`: it splits itself, though that cannot be seen in its samples.
        samples_per_epoch: Length of an epoch over all ranks, for an iterable dataset without `__len__`.
        epoch_end: `carry`: a batch may span two epochs; `drop`: the rest of an epoch is left out.
        prefetch_factor: Batches that each worker prepares ahead.
        timeout: Longest wait for a batch, as a duration.
        pin_memory: Page-locked batches; default where there is an accelerator.
        look_ahead: Batches of each worker whose files are fetched ahead, beyond those being made; default from the
            measured latency. 0 switches it off.
        on_error: What a sample that cannot be loaded does: `raise` stops the run; `skip` repeats another sample of its
            batch in its place; `substitute` takes another sample of the dataset.
        worker_restarts: How many workers that die are replaced per epoch.
    """

    num_workers: int | None = None
    position: str = "auto"
    split: str | None = None
    samples_per_epoch: int | None = None
    epoch_end: str = "carry"
    prefetch_factor: int = 4
    timeout: str = "600s"
    pin_memory: bool | None = None
    look_ahead: int | None = None
    on_error: str = "raise"
    worker_restarts: int = 3


@dataclass
class RunSettings:
    """Which run this is.

    Args:
        name: The identity of the run; default the name of the recipe.
        root: Folder of all runs.
        dir: The run directory; default `root/name`.
        resume: `auto`, `must` (an error if there is nothing to resume) or `never` (an error if there are checkpoints).
        init_from: A checkpoint whose weights a new run starts from.
        allow: Differences from the checkpoint that are permitted on resume, for example `[seed]`.
    """

    name: str | None = None
    root: str = "runs"
    dir: str | None = None
    resume: str = "auto"
    init_from: str | None = None
    allow: list[str] = field(default_factory=list)


@dataclass
class ParallelSettings:
    """How the model is spread over ranks.

    Args:
        strategy: `ddp`: every rank holds the whole model, gradients are averaged.
    """

    strategy: str = "ddp"
