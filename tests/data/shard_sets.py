"""Shards for tests, in every format, and runs over them that are killed and go on in other shapes."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from framework.data.shards import ShardStream
from framework.data.streams.loader import StreamLoader

GLOBAL_BATCH = 8


def write_tar(path: Path, samples: Iterable[dict[str, Any]], format: int = tarfile.PAX_FORMAT) -> None:
    """A tar file as webdataset lays it out: `__key__`, and bytes by ending."""
    with tarfile.open(path, "w", format=format) as tar:
        for sample in samples:
            for part, content in sample.items():
                if part != "__key__":
                    info = tarfile.TarInfo(f"{sample['__key__']}.{part}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def numbered(first: int, count: int, size: int = 10) -> list[dict[str, Any]]:
    """Samples with their number in `cls` and some bytes in `bin`."""
    return [
        {"__key__": f"k{number:06d}", "cls": str(number).encode(), "bin": random.Random(number).randbytes(size)}
        for number in range(first, first + count)
    ]


def write(folder: Path, kind: str, counts: Sequence[int], size: int = 10, rows: int = 3) -> Path:
    """Shards of so many samples each; a sample is known by its number among all. Empty files are no shards.

    Args:
        folder: Made.
        kind: `tar`, `parquet`, `text` or `jsonl`.
        counts: Samples of each shard.
        size: Bytes of each sample of a tar file.
        rows: In each row group of a parquet file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for place, count in enumerate(counts):
        numbers = range(first, first + count)
        name = folder / f"s{place:03d}"
        if kind == "tar":
            write_tar(name.with_suffix(".tar"), numbered(first, count, size))
        elif kind == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pa.table({"cls": list(numbers), "name": [f"n{number}" for number in numbers]})
            pq.write_table(table, name.with_suffix(".parquet"), row_group_size=rows)
        elif kind == "text":
            name.with_suffix(".txt").write_text("".join(f"{number}\n" for number in numbers))
        else:
            text = "".join(json.dumps({"cls": number}) + "\n" for number in numbers)
            name.with_suffix(".jsonl").write_text(text)
        first += count
    return folder


def stream(folder: Path, kind: str, **options: Any) -> ShardStream:
    """A stream whose samples are their numbers."""
    if kind == "text":
        return ShardStream(folder, decode=int, **options)
    return ShardStream(folder, fields=["cls"], transform=first, **options)


def first(sample: tuple[Any, ...]) -> Any:
    return sample[0]


def share(
    stream: ShardStream, epoch: int = 0, *, seed: int = 0, done: Any = None, shares: Sequence[int] | None = None,
    consumer: int = 0, taken: int = 0,
) -> list[tuple[int, Any]]:  # fmt: skip
    """What `begin` gives; all of it unless told otherwise."""
    shares = [len(stream)] if shares is None else shares
    return list(stream.begin(epoch, seed=seed, done=done, shares=shares, consumer=consumer, taken=taken))


class Life:
    """A run over a stream, with saves, kills, and other shapes after each of them.

    Args:
        stream: Its samples are their numbers.
        chance: Decides.

    Attributes:
        steps: Steps that are trained and not lost.
        seen: How often each (epoch, sample) was trained, losses undone.
        shapes: Those of its attempts.
    """

    def __init__(self, stream: ShardStream, chance: random.Random) -> None:
        self.stream = stream
        self.chance = chance
        self.steps = 0
        self.seen: Counter[tuple[int, int]] = Counter()
        self.shapes: list[tuple[int, int, int]] = []
        self._saved: tuple[int, Counter[tuple[int, int]], list[dict[str, Any]]] = (0, Counter(), [])

    def attempt(self, world: int, workers: int, steps: int, every: int) -> None:
        """Goes on from what was saved last, saves now and then, and is killed after so many steps."""
        self.steps, seen, states = self._saved
        self.seen = seen.copy()
        self.shapes.append((world, workers, self.steps))
        ranks = [self._loader(rank, world, workers) for rank in range(world)]
        try:
            for one in ranks:
                one.wants_receipts = True
                if states:
                    one.load_state(states, self.steps * GLOBAL_BATCH)
                one.seek(self.steps * GLOBAL_BATCH)
            for _ in range(steps):
                self._step(ranks)
                if self.steps % every == 0:
                    self._saved = (self.steps, self.seen.copy(), [one.state() for one in ranks])
        finally:
            for one in ranks:
                one.close()

    def check(self) -> None:
        """Every sample once in each epoch that is over, and at most once in the present one."""
        epochs, rest = divmod(self.steps * GLOBAL_BATCH, len(self.stream))
        expected = {(epoch, number) for epoch in range(epochs) for number in range(len(self.stream))}
        present = {one for one in self.seen if one not in expected}
        assert set(self.seen.values()) <= {1}, (self.shapes, self.seen.most_common(3))
        assert expected <= self.seen.keys(), (self.shapes, sorted(expected - self.seen.keys())[:5])
        assert {epoch for epoch, _ in present} <= {epochs} and len(present) == rest, self.shapes

    def _step(self, ranks: list[StreamLoader]) -> None:
        for one in ranks:
            batch = next(iter(one))
            (receipt,) = one.commit(1)
            assert receipt.ids.tolist() == batch.tolist()
            self.seen.update(zip(receipt.epochs.tolist(), batch.tolist(), strict=True))
        self.steps += 1

    def _loader(self, rank: int, world: int, workers: int) -> StreamLoader:
        return StreamLoader(
            self.stream, GLOBAL_BATCH // world, strategy="shards", samples=len(self.stream), seed=3, rank=rank,
            world_size=world, num_workers=workers, prefetch_factor=2, timeout=60, gather=lambda value: [value] * world,
        )  # fmt: skip


def live(folder: Path, seed: int, worker_choices: Sequence[int]) -> Life:
    """A life by chance: format, shards, buffer, and several attempts of other shapes."""
    chance = random.Random(seed)
    kind = chance.choice(["text", "text", "tar", "jsonl", "parquet"])
    counts = [chance.randint(1, 12) for _ in range(chance.randint(1, 7))]
    counts[0] += 8
    write(folder, kind, counts, rows=chance.randint(1, 5))
    made = stream(folder, kind, buffer=chance.choice([1, 2, 5, 16, 100]), shuffle_shards=chance.random() < 0.8)
    life = Life(made, chance)
    for _ in range(chance.randint(2, 5)):
        most = 3 * len(made) // GLOBAL_BATCH + 2
        life.attempt(
            chance.choice([1, 1, 2, 4]), chance.choice(worker_choices), chance.randint(1, most), chance.randint(1, 3)
        )
    return life
