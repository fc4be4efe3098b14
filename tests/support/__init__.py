"""What all tests share: processes that start warm, runs compared bit for bit, and the id log.

    from support import compare, start

    def test_something(tmp_path):
        start("+recipe=job", "run.name=u", cwd=tmp_path).ends(0)
        start("+recipe=job", "run.name=r", kill_at(17, "backward"), cwd=tmp_path).crashed()
        start("+recipe=job", "run.name=r", kill_at(17, "backward"), cwd=tmp_path).ends(0)
        assert compare(tmp_path / "runs/u", tmp_path / "runs/r") == []

`support/jobs` has the recipe `job` (96 samples, 12 steps an epoch) and callbacks; see `jobs/job_callbacks.py`.
"""

from support.commands import kill_at as kill_at
from support.commands import settle as settle
from support.commands import slow_save as slow_save
from support.comparison import checkpoint as checkpoint
from support.comparison import committed_steps as committed_steps
from support.comparison import compare as compare
from support.comparison import compare_histories as compare_histories
from support.comparison import contents as contents
from support.comparison import differences as differences
from support.comparison import events as events
from support.comparison import history as history
from support.idlog import Consumed as Consumed
from support.idlog import every_step as every_step
from support.idlog import global_batches as global_batches
from support.idlog import kept as kept
from support.processes import Run as Run
from support.processes import start as start
from support.survival import assert_same as assert_same
from support.survival import endure as endure
from support.survival import killed as killed
