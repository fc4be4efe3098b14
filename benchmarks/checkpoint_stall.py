"""What a save costs the training: ours beside others, in one run.

    python benchmarks/checkpoint_stall.py [--only ours] [--state large|small|both] [--saves 5] [--folder DIR] [--json FILE]

Two states: 1.07 GB in 150 tensors, and 0.40 GB in 5,001 (parameters and Adam's two moments). Each contender saves in a
process of its own, beside a loop of steps with one thread, each twice as long as a copy of the state; they follow one
another. Times are given as multiples
of one memory copy of the state, measured in the same process:

- first, blocked: how long the loop stood still for the first save and for the later ones (median), waits before the
  update included;
- worst step: how much longer the longest step beside a save was than the longest of as many without one;
- lost: the share of the time to write that the loop lost meanwhile;
- committed: from the call until the save was durable. `disk` is that as a multiple of one plain sequential write
  right before it, beside nothing.

Restores are from a warm page cache, as multiples of stock dcp.load's speed. Contenders that are not installed are
named: `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import warnings
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from checkpointing.contenders import MAKERS
from checkpointing.measure import Figures, restore, run
from checkpointing.states import LARGE, SMALL, Shape, make

PATIENCE_SECONDS = 900.0


def main() -> None:
    arguments = parse()
    shapes = [shape for shape in (LARGE, SMALL) if arguments.state in (shape.name, "both")]
    names = [name for name in MAKERS if arguments.only in name]
    results: dict[str, Any] = {}
    for shape in shapes:
        print(
            f"\n{shape.name}: {shape.bytes / 1e9:.2f} GB in {3 * shape.parameters:,} tensors, load {os.getloadavg()[0]:.1f}"
        )
        print(f"{'':30}{'first':>8}{'blocked':>9}{'worst step':>12}{'lost':>8}{'committed':>11}{'disk':>7}")
        for name in names:
            answer = in_process(name, shape, arguments.saves, arguments.folder)
            results[f"{shape.name}/{name}"] = answer
            print(f"{name:30}{row(answer)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only contenders with this in their name")
    parser.add_argument("--state", choices=("large", "small", "both"), default="both")
    parser.add_argument("--saves", type=int, default=5, help="saves of each contender, at least 2")
    parser.add_argument("--folder", type=Path, help="where to save, default a folder for temporary files")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    if arguments.saves < 2:
        parser.error("--saves must be at least 2: the first one is told apart")
    return arguments


def row(answer: dict[str, Any] | str) -> str:
    if isinstance(answer, str):
        return f"  left out: {answer}"
    figures = Figures(**answer["figures"])
    times = f"{figures.first / figures.memcpy:8.2f}{figures.blocked / figures.memcpy:9.2f}"
    beside = f"{figures.worst_step * 1e3:9.1f} ms{figures.lost:8.1%}"
    text = f"{times}{beside}{figures.committed / figures.memcpy:11.1f}{figures.disk:7.2f}"
    if loads := answer.get("restore"):
        stock = loads["dcp.load"]
        ratios = ", ".join(f"{name} {stock / seconds:.1f}x" for name, seconds in loads.items() if name != "dcp.load")
        text += f"\n{'':30}restore against dcp.load: {ratios}"
    return text


def in_process(name: str, shape: Shape, saves: int, folder: Path | None) -> dict[str, Any] | str:
    """Figures of one contender, or why there are none."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measured, args=(theirs, name, shape, saves, folder))
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_SECONDS):
            return f"no answer within {PATIENCE_SECONDS:g} s"
        answer: dict[str, Any] | str = ours.recv()
        return answer
    except EOFError:
        return "its process died"
    finally:
        process.join(30)
        if process.is_alive():
            process.kill()
        process.join()


def measured(pipe: Connection, name: str, shape: Shape, saves: int, parent: Path | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="stall-", dir=parent))
    try:
        contender = MAKERS[name](folder)
        state = make(shape)
        answer: dict[str, Any] = {"figures": asdict(run(contender, state, saves))}
        contender.close()
        if name.startswith("ours"):
            answer["restore"] = restore(folder, state, saves)
        pipe.send(answer)
    except ImportError as error:
        pipe.send(f"not installed ({error})")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
