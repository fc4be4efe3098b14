"""Rows of a parquet file as samples, by pyarrow.

Guarantee: no more than one row group is held; only the columns that are wanted are read. Values are plain python's.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.data.shards.base import Bytes, Damage, Samples
from framework.errors import ConfigError

ROWS = 64  # turned into python's values at once


class ParquetSamples(Samples):
    """See the module. A sample is a dict of its columns.

    Args:
        source: The shard.
        columns: Names of the columns that are read; none: all.
    """

    def __init__(self, source: Bytes, columns: Sequence[str] | None = None) -> None:
        super().__init__(source)
        self._columns = None if columns is None else list(columns)
        self._opened: Any = None
        self._starts = np.zeros(1, dtype=np.int64)  # number of the first row of each group, and of all
        self._group, self._table = -1, None
        self._first, self._rows = 0, list[dict[str, Any]]()

    def count(self) -> int:
        self._open()
        return int(self._starts[-1])

    def take(self, index: int) -> Any:
        if not self._first <= index < self._first + len(self._rows):
            self._load(index)
        return dict(self._rows[index - self._first])

    def is_end(self, count: int) -> bool:
        return self.count() == count

    def _load(self, index: int) -> None:
        self._open()
        if index >= self._starts[-1]:
            raise Damage(self.source.size, f"it has {self._starts[-1]} rows, and row {index} was expected")
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        if group != self._group:
            self._table = None  # lets the memory go before more is taken
            self._table = self._read(group)
            self._group = group
        start = (index - int(self._starts[group])) // ROWS * ROWS
        assert self._table is not None
        self._rows = self._table.slice(start, ROWS).to_pylist()
        self._first = int(self._starts[group]) + start

    def _open(self) -> None:
        if self._opened is not None:
            return
        pyarrow, parquet = _packages()
        try:
            self._opened = parquet.ParquetFile(_File(self.source), pre_buffer=False)
        except pyarrow.ArrowException as error:
            raise Damage(max(0, self.source.size - 8), f"its footer cannot be read: {_line(error)}") from error
        metadata = self._opened.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *rows], dtype=np.int64)
        missing = set(self._columns or ()) - set(self._opened.schema_arrow.names)
        if missing:
            names = ", ".join(self._opened.schema_arrow.names)
            raise ConfigError(f"fields={sorted(missing)}: there are no such columns. There are: {names}.")

    def _read(self, group: int) -> Any:
        pyarrow, _ = _packages()
        try:
            return self._opened.read_row_group(group, columns=self._columns, use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            column = self._opened.metadata.row_group(group).column(0)
            offset = column.dictionary_page_offset or column.data_page_offset
            raise Damage(offset, f"row group {group} cannot be read: {_line(error)}") from error


class _File(io.RawIOBase):
    """The bytes of a shard as a file."""

    def __init__(self, source: Bytes) -> None:
        self._source = source
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._source.size}[whence]
        self._place = base + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(self._place, self._source.size if size < 0 else size)
        self._place += len(data)
        return data


def _packages() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "parquet files need the package pyarrow: pip install 'goodput-framework[parquet]'."
        ) from error
    return pyarrow, pyarrow.parquet


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
