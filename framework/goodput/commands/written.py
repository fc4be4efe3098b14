"""What commands say of a file that they were asked to write and could not.

Guarantee: the file and the reason are named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from framework.errors import ConfigError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises:
    ConfigError: What is done inside could not write the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be written: {reason}. Give a file whose folder exists.") from error
