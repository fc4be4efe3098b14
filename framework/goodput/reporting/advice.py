"""What to do about the time that was lost, in plain words.

Guarantee: every figure in it is from this run's journal, and every setting is named by its key with a value to set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from framework.goodput.accounts.results import Goodput
from framework.goodput.planning.interval import Inputs, choose
from framework.goodput.planning.observed import believed_rate, last_choice, observe, ranks_of
from framework.goodput.reporting.incidents import Incident
from framework.goodput.reporting.words import duration, ranked
from framework.rundir import RunDirectory
from framework.speaking import count_text

BIG_SHARE = 0.02  # a loss worth a word
EVERY = "callbacks.async_checkpoint.every"

PLAIN = {
    "init": "from process start to the first step: imports, building model and data, joining the ranks. It is paid once "
    "per attempt: fewer restarts, and packages and data on a local disk, make it shorter",
    "queue": "waiting for an allocation",
    "paused": "the run was finished and was extended later",
    "other": "nothing was recorded for it: hooks between steps, shutting down, or a run that hangs now",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """What advice is made from.

    Args:
        goodput: The account.
        incidents: What went wrong.
        settings: The run's resolved config.
        every_seconds: The best interval between saves, from what was measured.
    """

    goodput: Goodput
    incidents: list[Incident]
    settings: Mapping[str, Any]
    every_seconds: float

    def setting(self, key: str) -> Any:
        """The value of `a.b.c`, none if there is none."""
        value: Any = self.settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def now(self, key: str) -> str:
        """The value of a key behind advice to change it; nothing if there is none."""
        value = self.setting(key)
        return "" if value is None else f" (now {value})"


def facts(
    run: RunDirectory,
    events: Iterable[Mapping[str, Any]],
    goodput: Goodput,
    incidents: list[Incident],
    live: int | None,
) -> Facts:
    """Gathers them.

    Args:
        run: Where the config is.
        events: The journal.
        goodput: The account.
        incidents: What went wrong.
        live: The attempt that runs now, if one does.
    """
    events = list(events)
    inputs = Inputs.of(believed_rate(last_choice(events)), ranks_of(events), observe(events, live=live))
    best = choose(inputs.stall_seconds, inputs.persist_seconds, inputs.mtbf_seconds)
    return Facts(goodput, incidents, _config(run), best.seconds)


def losses(known: Facts) -> list[tuple[str, str]]:
    """The three biggest losses: category and what to do, the biggest first."""
    goodput = known.goodput
    wanted = [n for n, seconds in ranked(goodput) if n != "productive" and seconds > BIG_SHARE * goodput.wall][:3]
    return [(name, advice(name, known)) for name in wanted]


def advice(category: str, known: Facts) -> str:
    """What to do about the time of a category, in a sentence."""
    make = _ADVICE.get(category)
    text = make(known) if make is not None else PLAIN[category]
    return f"{text}."


def _lost(known: Facts) -> str:
    restarts = sum(1 for one in known.incidents if one.lost_steps)
    each = f" ({known.goodput.steps_lost:,} in {count_text(restarts, 'restart')})" if restarts else ""
    text = f"steps since the last checkpoint that were done again{each}"
    return f"{text}; {_save(known, 'save more often')}"


def _checkpoint(known: Facts) -> str:
    stall = known.goodput.checkpoint_stall
    each = f", the newest for {stall:.2g} s" if stall is not None else ""
    return f"saves hold the steps up{each}; {_save(known, 'save less often')}, or to a faster disk (run.root)"


def _save(known: Facts, words: str) -> str:
    if known.setting(EVERY) == "auto":
        return f"{EVERY}=auto already saves as often as is best for what was measured"
    return f"{words}: set {EVERY}=auto, which would save every {duration(known.every_seconds)}{known.now(EVERY)}"


def _data_wait(known: Facts) -> str:
    workers, ahead = known.setting("loader.num_workers"), known.setting("loader.prefetch_factor")
    share = f"the model waits for data {known.goodput.data_fetch_fraction:.0%} of the time of its steps; "
    if type(workers) is not int:
        return f"{share}raise loader.num_workers or loader.prefetch_factor, or make decoding cheaper"
    if workers == 0:
        return f"{share}set loader.num_workers=2 or more (now 0: the training process loads every sample itself)"
    more = f"set loader.num_workers={2 * workers} (now {workers}), if there are cores to spare"
    further = f", or loader.prefetch_factor={2 * ahead} (now {ahead})" if type(ahead) is int else ""
    return f"{share}{more}{further}"


def _evaluation(known: Facts) -> str:
    now = known.now("trainer.eval_every")
    return f"evaluate less often: set trainer.eval_every to twice as long{now}; or raise trainer.eval_batch_size"


def _warmup(known: Facts) -> str:
    return (
        f"the first steps of {count_text(known.goodput.attempts, 'attempt')} were slower than the usual one (compilation, "
        "autotuning, cold caches): keep compile caches between attempts (TORCHINDUCTOR_CACHE_DIR on a disk that stays)"
    )


def _restore(known: Facts) -> str:
    each = known.goodput.seconds["restore"] / max(1, known.goodput.attempts - 1)
    return f"reading a checkpoint back took {duration(each)} per restart: put the run on faster storage (run.root)"


def _detect(known: Facts) -> str:
    now = known.now("trainer.timeout")
    return f"time until a failure was noticed: lower trainer.timeout{now}, to a few times the longest step or save"


def _down(known: Facts) -> str:
    waits = [one.down_seconds for one in known.incidents if one.down_seconds > 0]
    longest = f"; the longest of {count_text(len(waits), 'wait')} took {duration(max(waits))}" if waits else ""
    return (
        f"nobody restarted the run{longest}: have the scheduler start the same command again at once (Slurm: --requeue; "
        "torchrun: --max-restarts)"
    )


_ADVICE = {
    "lost": _lost, "checkpoint": _checkpoint, "data_wait": _data_wait, "evaluation": _evaluation, "warmup": _warmup,
    "restore": _restore, "detect": _detect, "down": _down,
}  # fmt: skip


def _config(run: RunDirectory) -> Mapping[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(run.config_file.read_text())
    except (OSError, UnicodeError, yaml.YAMLError):
        return {}  # advice then names the keys without their present values
    return value if isinstance(value, Mapping) else {}
