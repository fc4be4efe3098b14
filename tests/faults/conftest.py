from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "checkpoint"))  # for checkpoint_support

from syscalls import supervised as supervised
