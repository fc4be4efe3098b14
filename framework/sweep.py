"""Sweeps: one job for each combination of values, each a run of its own in a process of its own.

Guarantee: every job has its own name, directory and log, the same ones whenever the same sweep is started again, so
that it goes on where it stopped; a failing job does not stop the others; the summary names every one that failed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from framework.config import check, compose
from framework.config.overrides import jobs
from framework.errors import EXIT_DONE, EXIT_ERROR, ConfigError, FrameworkError
from framework.journal import read_run
from framework.rundir import RunDirectory

LOG = "train.log"
_PARENT = "FRAMEWORK_SWEEP_PARENT"
_SUFFIX_LENGTH = 100
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        words: Its overrides, `run.name` last.
        name: Its run name.
        run_dir: Its run directory.
        error: Why it cannot start, or the empty string.
        exit_code: How it ended, or none if it did not run.
    """

    words: tuple[str, ...]
    name: str
    run_dir: Path
    error: str = ""
    exit_code: int | None = None

    @property
    def log(self) -> Path:
        return self.run_dir / LOG

    @property
    def is_done(self) -> bool:
        return not self.error and self.exit_code == EXIT_DONE


def plan(words: Sequence[str]) -> list[Job]:
    """The jobs of a sweep, each checked.

    Raises:
        ConfigError: None of them can start, or they would share a run directory.
    """
    planned: list[Job] = []
    errors: list[str] = []
    for job_words, swept in jobs(words):
        try:
            config = compose(job_words)
        except ConfigError as error:
            errors.append(str(error))
            planned.append(Job(tuple(job_words), _suffix(swept), Path(), error=str(error)))
            continue
        run = config.values["run"]
        if run["dir"] != os.path.join(run["root"], run["name"]):
            raise ConfigError("run.dir is the directory of one run. For the runs of a sweep set run.root.")
        name = _free("-".join(filter(None, (run["name"], _suffix(swept)))), swept, {job.name for job in planned})
        job = Job((*job_words, f"run.name={name}"), name, Path(run["root"]) / name)
        try:
            check(config)
        except ConfigError as error:
            errors.append(str(error))
            job = replace(job, error=str(error))
        planned.append(job)
    if len(errors) == len(planned):
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    return planned


def _suffix(swept: Sequence[str]) -> str:
    """What tells a job from its siblings, in letters that need no quotes anywhere."""
    kept = [word for word in swept if not re.match(r"\+{0,2}(recipe|run\.name)=", word)]
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(word.lstrip("+~") for word in kept)).strip("-")
    return text if len(text) <= _SUFFIX_LENGTH else f"{text[:_SUFFIX_LENGTH]}-{_digest(kept)}"


def _digest(words: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=4).hexdigest()


def _free(name: str, swept: Sequence[str], taken: set[str]) -> str:
    return name if name not in taken else f"{name}-{_digest(swept)}"


def run(words: Sequence[str]) -> int:
    """Runs all jobs of a sweep, one after the other, and prints a summary.

    Args:
        words: Overrides, some with several values.

    Returns:
        0 if all jobs are done, the exit code of the interrupted job after a signal, and 1 otherwise.

    Raises:
        ConfigError: No job can start.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "-m starts one process for each job and cannot run under torchrun. Start the jobs one by one."
        )
    planned = plan(words)
    ended: list[Job] = []
    for number, job in enumerate(planned, start=1):
        if job.error and job.run_dir == Path():
            ended.append(job)
            continue
        print(f"[{number}/{len(planned)}] {job.name}: {job.log}", flush=True)
        job, interrupted = _refused(job) if job.error else _execute(job)
        ended.append(job)
        if interrupted:
            _summarise([*ended, *planned[number:]])
            return job.exit_code or EXIT_ERROR
    _summarise(ended)
    return EXIT_DONE if all(job.is_done for job in ended) else EXIT_ERROR


def _refused(job: Job) -> tuple[Job, bool]:
    """Leaves the reason where the others leave their logs."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as log:
        log.write(f"error: {job.error}\n")
    return replace(job, exit_code=EXIT_ERROR), False


def _execute(job: Job) -> tuple[Job, bool]:
    """Runs one job; returns it with its exit code, and whether a signal was passed on to it."""
    command = [sys.executable, "-m", "framework.train", *job.words]
    job.run_dir.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        # a session of its own: the terminal's signals reach the job once, through this process
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {_PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        with _passing_signals(child) as passed:
            code = child.wait()
    return replace(job, exit_code=code if code >= 0 else 128 - code), bool(passed)


@contextmanager
def _passing_signals(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    passed: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        child.send_signal(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield passed
        return
    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """In a job of a sweep: asks the kernel to stop this process (SIGTERM, so it saves) when the sweep's own ends.

    Raises:
        FrameworkError: The sweep has ended already.
    """
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        raise FrameworkError("The sweep that started this job has ended.")


def _summarise(ended: Sequence[Job]) -> None:
    failed = [job for job in ended if not job.is_done]
    print(f"sweep: {len(ended) - len(failed)} of {len(ended)} jobs done", flush=True)
    for job in ended:
        metrics = _last_metrics(job)
        if metrics:
            print(f"  {job.name}: {metrics}", flush=True)
    for job in failed:
        if job.exit_code is None and not job.error:
            print(f"  not started: {job.name}", flush=True)
        elif job.run_dir == Path():
            print(f"  failed: {job.name}: {job.error.splitlines()[0]}", flush=True)
        else:
            print(f"  failed: {job.name}: exit code {job.exit_code}: {_last_line(job.log)} (see {job.log})", flush=True)


def _last_metrics(job: Job) -> str:
    """The newest value of each metric in its journal, over all its attempts; empty if there is none."""
    if job.run_dir == Path() or job.exit_code is None:
        return ""
    found: dict[str, str] = {}
    step = 0
    for event in read_run(RunDirectory(job.run_dir).events):
        if event.get("ev") == "metrics":
            step = event["step"]
            found |= {
                name: f"{value:.6g}" if isinstance(value, (int, float)) else str(value)
                for name, value in event["values"].items()
            }
    return f"{', '.join(f'{name} {value}' for name, value in found.items())} (step {step})" if found else ""


def _last_line(log: Path) -> str:
    newest = re.split(r"(?m)^\$ ", log.read_text(errors="replace"))[-1]  # a log goes on over all attempts
    lines = [line.strip() for line in newest.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    return (said or lines or ["(nothing was printed)"])[-1]
