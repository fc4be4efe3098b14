"""The audit of streams that know no ids: their samples are numbered by the readers that gave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from framework.data.audit.check import audit
from framework.data.audit.log import AuditLog, log_path
from framework.data.receipt import Receipt
from framework.duration import ENDLESS

SHARES = [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7]]  # what two readers give of an epoch of 12


def audited(folder: Path, epochs: list[list[int]], samples: int = 12) -> Any:
    facts = {
        "attempt": 1, "rank": 0, "world": 1, "step": 0, "samples": samples, "strategy": "stateful", "epoch_end": "carry",
        "global_batch": 4, "starts": [0], "readers": 2,
    }  # fmt: skip
    log = AuditLog(log_path(folder, 1, 0), facts)
    pairs = [(epoch, number) for epoch, ids in enumerate(epochs) for number in ids]
    for step in range(1, len(pairs) // 4 + 1):
        part = np.array(pairs[4 * step - 4 : 4 * step], dtype=np.int64)
        log.trained(step, [Receipt(part[:, 0], part[:, 1])])
    log.close()
    return audit(folder)


def test_readers_with_unequal_shares_are_clean(tmp_path: Path) -> None:
    whole = [*SHARES[0], *SHARES[1]]
    for samples in (12, ENDLESS):
        found = audited(tmp_path / str(samples), [whole, whole, whole], samples)
        assert found.is_clean and [each.trained for each in found.epochs] == [12, 12, 12]
        assert [each.samples for each in found.epochs] == [12, 12, 12]


def test_what_a_reader_left_out_or_gave_twice_is_found(tmp_path: Path) -> None:
    whole = [*SHARES[0], *SHARES[1]]
    without = [number for number in whole if number != 6]
    found = audited(tmp_path, [[*without, 3], whole, whole])
    assert not found.is_clean
    assert found.epochs[0].missing == [6] and list(found.epochs[0].repeated) == [3]
    cut = audited(tmp_path / "cut", [whole[:8], whole, whole])  # the second reader gave nothing
    assert len(cut.epochs[0].missing) == 4
