"""A training process for the tests: loads with workers, tells their pids, and ends in one of several ways.

python loader_process.py METHOD HOW; it prints `ready PID…` and then one line for each thing it did.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
import time

from data_sets import Numbers

from framework.data import DataLoader

seen: list[int] = []
kept: list[object] = []  # what is still there at the end of the process


def worker_pids(loader: DataLoader) -> list[int]:
    assert loader._pool is not None
    return loader._pool.pids


def train(method: str, how: str) -> None:
    special = {5: "sleep"} if how == "busy" else {}
    loader = DataLoader(
        Numbers(1000, special), 1, shuffle=False, endless=True, num_workers=2, multiprocessing_context=method
    )
    batches = iter(loader)
    kept.extend([loader, batches])
    assert [next(batches).item() for _ in range(5)] == list(range(5))
    print("ready", *worker_pids(loader), flush=True)
    if how == "busy":
        time.sleep(60)
    if how == "signals":
        while len(seen) < 2:
            time.sleep(0.01)
        expected = list(range(5, 105))
        assert [batch.item() for batch in itertools.islice(batches, 100)] == expected
        print("went on", flush=True)
        loader.close()
        print("closed", flush=True)
    # "leave": ends with its workers running


def main() -> None:
    method, how = sys.argv[1:]
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: seen.append(number))
    if how == "child":
        child = multiprocessing.get_context("fork").Process(target=train, args=(method, "leave"))
        child.start()
        child.join()
        assert child.exitcode == 0
    else:
        train(method, how)
    print("done", flush=True)


if __name__ == "__main__":
    main()
