"""Starts training processes for tests, and makes sure that none is left.

    run = start("+recipe=job", "trainer.max_steps=60", cwd=tmp_path)            one process
    run = start("+recipe=job", cwd=tmp_path, ranks=2)                           two ranks, as torchrun starts them
    run = start("+recipe=job", cwd=tmp_path, cold=True)                         python -m framework.train
    run = start("+recipe=job", cwd=tmp_path, ranks=2, cold=True)                the real torchrun
    run.ends(0)                                    waits; fails with the run's output if another code came
    run.kill(rank=1); run.crashed()                kill -9 of one rank, then of what is left, as a launcher does

Guarantee: a run starts in a warm child (see `support.server`: about 0.4 s instead of 6 s) that behaves like a fresh
interpreter. Every wait is bounded. Whatever a test started is dead when the test is over, and a test that leaves a
process of its run behind fails.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import select
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from support.piped import Piped

HERE = Path(__file__).resolve().parent
JOBS = HERE / "jobs"
ROOT = HERE.parent.parent
MARK = "FRAMEWORK_TEST_SESSION"
# up to this torch a forked process that holds the store of the ranks does not end
HANGS_FORKED = tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) <= (2, 11)
WAIT_SECONDS = 150.0  # a test's run takes a few seconds; the machine may be busy
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Run:
    """A started command: one process, or one for each rank. Made by `start`.

    Attributes:
        pids: Process ids by rank; with the real torchrun the launcher's alone.
        cwd: The folder it runs in.
        logs: Output files by rank, (stdout, stderr).
        codes: Exit codes of the ranks that were seen to end, by rank; minus its number for a signal.
    """

    def __init__(self, starter: Starter, pids: list[int], cwd: Path, logs: list[tuple[Path, Path]]) -> None:
        self._starter = starter
        self.pids = pids
        self.cwd = cwd
        self.logs = logs
        self._fds = [os.pidfd_open(pid) for pid in pids]  # no child is reaped before `codes` has it: pids stay ours
        self.codes: dict[int, int] = {}
        self._children: dict[int, psutil.Process] = {}

    def wait(self, timeout: float = WAIT_SECONDS) -> list[int]:
        """Exit codes by rank, once all have ended; killed by a signal is minus its number.

        Raises:
            AssertionError: They did not end in time; they are killed, and the message has their output.
        """
        deadline = time.monotonic() + timeout
        while len(self.codes) < len(self.pids):
            if not self.wait_any(deadline - time.monotonic()):
                text = self.output()
                self.kill_all()
                raise AssertionError(f"still running after {timeout:g} s\n{text}")
        return [self.codes[rank] for rank in range(len(self.pids))]

    def ends(self, code: int = 0, timeout: float = WAIT_SECONDS) -> Run:
        """Waits, and checks that every rank ended with `code`.

        Raises:
            AssertionError: One did not; the message has the output of all.
        """
        codes = self.wait(timeout)
        assert codes == [code] * len(codes), f"exit codes {codes} instead of {code}\n{self.output()}"
        return self

    def crashed(self, rank: int = 0, timeout: float = WAIT_SECONDS) -> Run:
        """Waits until one rank was killed by SIGKILL, then kills what is left of the run, as a launcher would.

        Raises:
            AssertionError: It ended otherwise, or not in time.
        """
        deadline = time.monotonic() + timeout
        while rank not in self.codes and self.wait_any(deadline - time.monotonic()):
            pass
        code = self.codes.get(rank)
        text = self.output() if code != -signal.SIGKILL else ""
        self.kill_all()
        assert code == -signal.SIGKILL, f"rank {rank} was to be killed; its exit code is {code}\n{text}"
        return self

    def until(self, condition: Callable[[], bool], timeout: float = WAIT_SECONDS) -> Run:
        """Waits until a condition holds while the run is alive; it is asked every few milliseconds.

        Raises:
            AssertionError: The run ended before, or it took too long.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            self.wait_any(0)
            assert not self.codes or condition(), f"ended too early: {self.codes}\n{self.output()}"
            assert time.monotonic() < deadline, f"did not come about in {timeout:g} s\n{self.output()}"
            time.sleep(0.005)
        return self

    def is_alive(self, rank: int = 0) -> bool:
        """Whether a rank's process still runs."""
        return rank not in self.codes and not select.select([self._fds[rank]], [], [], 0)[0]

    def kill(self, rank: int = 0, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank; nothing happens if it has ended."""
        if rank not in self.codes:
            self._remember_children()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fds[rank], number)

    def kill_all(self) -> list[int]:
        """Kills every rank and every process below it with SIGKILL, and waits; returns the exit codes."""
        self._remember_children()
        for rank in range(len(self.pids)):
            self.kill(rank)
        codes = self.wait(30)
        for child in self._children.values():  # psutil compares start times: another process of that id is safe
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return codes

    def output(self, rank: int | None = None) -> str:
        """What was printed so far, stdout and then stderr, of one rank or of all."""
        ranks = range(len(self.logs)) if rank is None else [rank]
        return "".join(self.stdout(r) + self.stderr(r) for r in ranks)

    def stdout(self, rank: int = 0) -> str:
        return self.logs[rank][0].read_text(errors="replace")

    def stderr(self, rank: int = 0) -> str:
        return self.logs[rank][1].read_text(errors="replace")

    def _remember_children(self) -> None:
        """Children that live in sessions of their own are found only while their parent lives."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._children |= {child.pid: child for child in psutil.Process(pid).children(recursive=True)}

    def wait_any(self, timeout: float) -> bool:
        """Waits until another rank ends; whether one did within the timeout, in seconds."""
        waiting = [rank for rank in range(len(self.pids)) if rank not in self.codes]
        ready = select.select([self._fds[rank] for rank in waiting], [], [], max(0.0, timeout))[0] if waiting else []
        for rank in waiting:
            if self._fds[rank] in ready:
                self.codes[rank] = self._starter.reap(self.pids[rank])
                os.close(self._fds[rank])
        return bool(ready)


class Starter:
    """The warm process and all runs that came of it. Use `start`."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.runs: list[Run] = []
        self._count = itertools.count(1)
        self._process = Piped(HERE / "server.py", _environment({}) | {MARK: self.mark}, "the warm process")
        self._process.answer(120)

    def start(
        self, words: tuple[str, ...], cwd: Path, ranks: int, env: Mapping[str, str], cold: bool, program: list[str]
    ) -> Run:
        environment = _environment(env) | {MARK: self.mark}
        if not (cwd / "configs").exists():
            (cwd / "configs").symlink_to(JOBS / "configs")
        if cold and ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            return self._run([[sys.executable, *launcher, *program, *words]], words, cwd, [environment])
        places = [environment | place for place in _places(ranks)]
        is_new = cold or (ranks > 1 and HANGS_FORKED)
        commands: list[list[str] | None] = [[sys.executable, *program, *words] if is_new else None] * ranks
        return self._run(commands, words, cwd, places)

    def reap(self, pid: int) -> int:
        return self._ask({"do": "reap", "pid": pid})

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this session's runs that are still there, other than the warm process."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if mark in environ.split(b"\0") and process.pid != self._process.pid:
                    found.append(process)
        return found

    def clean(self) -> list[str]:
        """Ends all runs; returns what they left running all the same, and kills that too."""
        for run in self.runs:
            run.kill_all()
        self.runs.clear()
        deadline = time.monotonic() + 5
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        names = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
                process.kill()
        return names

    def stop(self) -> None:
        """Ends the warm process: its children die with it."""
        self._process.stop()

    def _run(
        self, commands: list[list[str] | None], words: tuple[str, ...], cwd: Path, environments: list[dict[str, str]]
    ) -> Run:
        folder = cwd / "output"
        folder.mkdir(exist_ok=True)
        number = next(self._count)
        logs = [
            (folder / f"{number:03d}.rank{rank}.out", folder / f"{number:03d}.rank{rank}.err")
            for rank in range(len(commands))
        ]
        pids = []
        for command, environment, (out, err) in zip(commands, environments, logs, strict=True):
            out.touch()
            err.touch()
            request = {"command": command, "words": words, "cwd": str(cwd), "env": environment}
            pids.append(self._ask({"do": "start", "out": str(out), "err": str(err), **request}))
        run = Run(self, pids, cwd, logs)
        self.runs.append(run)
        return run

    def _ask(self, request: object) -> int:
        self._process.tell(json.dumps(request))
        return int(json.loads(self._process.answer(30)))


_starter: Starter | None = None


def starter() -> Starter:
    """The one of this test session, started when first needed."""
    global _starter
    if _starter is None:
        _starter = Starter()
    return _starter


def start(
    *words: str,
    cwd: Path,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    cold: bool = False,
    program: tuple[str, ...] = ("-m", "framework.train"),
) -> Run:
    """Starts `python -m framework.train WORDS` in a folder; returns at once.

    Args:
        words: The command line.
        cwd: The user's folder. If it has no `configs`, it gets a link to the configs of `support/jobs`, so that
            `+recipe=job` is found; the modules of `support/jobs` can be imported anyway. Output goes to `cwd/output`.
        ranks: Number of processes, each with the variables that torchrun sets.
        env: Variables to set; an empty value removes one.
        cold: Starts a new interpreter, and for several ranks the real torchrun.
        program: What a cold start runs instead.
    """
    return starter().start(words, Path(cwd), ranks, env or {}, cold, list(program))


def clean() -> list[str]:
    """Ends what the test started; returns what was left running though its run had ended."""
    return _starter.clean() if _starter is not None else []


def stop() -> None:
    """Ends the warm process, at the end of the session."""
    global _starter
    if _starter is not None:
        _starter.stop()
        _starter = None


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(JOBS), str(ROOT)])
    environment.pop("PYTHONWARNINGS", None)
    environment |= extra
    return {name: value for name, value in environment.items() if value}


def _places(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**shared, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
