"""The warm process: imports everything a training needs once, then forks a child for each run that it is asked for.

Guarantee: a child starts as `python -m framework.train` would in its folder: its own session, its own files for input
and output, the import path, environment and random seeds of a fresh interpreter. It dies with this process, and this
process ends when whoever started it is gone. Only the hash seed of strings is shared by all children.

Run as a script by `support.processes`; one JSON request a line comes in, one JSON answer a line goes out.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torchvision.transforms.v2", "PIL.Image",
    "hydra", "hydra.core.plugins", "omegaconf", "rich.console", "attr", "framework.train", "framework.config",
    "framework.callbacks", "framework.trainer", "framework.sweep", "framework.goodput.reporting.report",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def preload() -> None:
    """Imports what runs need. No thread may come of it: a thread does not survive a fork."""
    for name in PRELOADED:
        importlib.import_module(name)
    from hydra.core.plugins import Plugins

    Plugins.instance()  # looks through all of Hydra's plugins once
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import started a thread; forked children would miss it")
    gc.collect()
    gc.freeze()


def serve(requests: Any, answers: Any, base_path: list[str]) -> Callable[[], int] | None:
    """Answers requests until there are no more; in a forked child returns what the child has to do."""
    for line in requests:
        request = json.loads(line)
        if request["do"] == "start":
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                os.close(answers.fileno())
                return _prepare_child(request, parent, base_path)
            answer: Any = pid
        else:  # "reap"
            _, status = os.waitpid(request["pid"], 0)
            answer = os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), file=answers, flush=True)
    return None


def _prepare_child(request: dict[str, Any], parent: int, base_path: list[str]) -> Callable[[], int]:
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _redirect(request["out"], request["err"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    command = request["command"]
    if command is not None:
        return lambda: os.execvpe(command[0], command, os.environ)
    own = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [os.getcwd(), *own, *base_path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    _seed_anew()
    train = importlib.import_module("framework.train")
    sys.argv[:] = [str(train.__file__), *request["words"]]
    return lambda: train.main()


def _redirect(out: str, err: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, fd in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(out, flags)), (2, os.open(err, flags))):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)


def _seed_anew() -> None:
    """As in a fresh interpreter: what a run forgets to seed must differ from run to run."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.default_generator.manual_seed(int.from_bytes(os.urandom(8), "little"))


def main() -> int:
    own = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    base_path = [place for place in sys.path[1:] if place not in own]
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    preload()
    print(json.dumps("ready"), file=answers, flush=True)
    job = serve(requests, answers, base_path)
    return job() if job is not None else 0


if __name__ == "__main__":
    sys.exit(main())
