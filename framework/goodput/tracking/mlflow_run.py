"""The MLflow run that a run is copied to.

Guarantee: one MLflow run per run directory and tracking server, over all attempts and whatever is killed when.
`mlflow.json` names it and how far the journal has been copied. It is written after the server has taken the points:
killed in between, the same points are sent once more, equal to the last bit, and MLflow keeps equal points once.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from framework.goodput.tracking.artifacts import write_report
from framework.goodput.tracking.names import safe_params, sqlite_file, without_password
from framework.goodput.tracking.points import MAX_TAG, Point
from framework.rundir import RunDirectory

log = logging.getLogger(__name__)

METRICS_PER_CALL = 1000
ENTRIES_PER_CALL = 100
LOCK_SECONDS = 120.0
MAX_TAG_KEY = 250
KEY_TAG = "framework.run_key"


@dataclass(frozen=True, slots=True)
class ExportState:
    """The content of `mlflow.json`.

    Args:
        tracking_uri: Address of the tracking server, a password in it replaced by `***`.
        experiment: Name of the experiment.
        run_name: Name of the MLflow run.
        key: Tag by which the run is found again if this file could not say that it had been made.
        experiment_id: Its experiment's id, once known.
        run_id: The run's id, once known.
        attempt: Attempt of the newest event that is in MLflow.
        seq: Sequence number of that event.
        config_sha256: Of the `config.yaml` that was logged.
        reported: Up to which event the report that was logged goes, `attempt:seq`.
    """

    tracking_uri: str
    experiment: str
    run_name: str
    key: str
    experiment_id: str = ""
    run_id: str = ""
    attempt: int = 0
    seq: int = -1
    config_sha256: str = ""
    reported: str = ""

    @property
    def cursor(self) -> tuple[int, int]:
        return self.attempt, self.seq

    @classmethod
    def read(cls, file: Path) -> ExportState | None:
        """The state in `file`; none if there is none, or none that can be understood."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, file: Path) -> None:
        """Replaces `file` in one piece."""
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump({"version": 1} | asdict(self), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)


class MlflowRun:
    """Talks to the tracking server. Every method may raise whatever MLflow raises, and may be called again then.

    Args:
        run: The run directory.
        uri: Tracking URI, as `tracking.check_uri` returned it.
        experiment: Name of the experiment; made if there is none.
        run_name: Name of the MLflow run.
    """

    def __init__(self, run: RunDirectory, uri: str, experiment: str, run_name: str) -> None:
        self._run = run
        self._uri = uri
        self._client: Any = None
        fresh = ExportState(without_password(uri), experiment, run_name, self._key())
        state = ExportState.read(run.mlflow_file)
        if state is None and run.mlflow_file.exists():
            log.warning(
                "%s cannot be read. The MLflow run is looked for by its tag %s, and everything is sent again.",
                run.mlflow_file, KEY_TAG,
            )  # fmt: skip
        is_same = state is not None and (state.tracking_uri, state.experiment) == (fresh.tracking_uri, experiment)
        self.state = state if state is not None and is_same else fresh

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    def connect(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Finds or makes the experiment and the run, and logs the configuration.

        Args:
            waiting: Called whenever something went forward, and every second while another process makes the tables
                of an sqlite file.
        """
        with _schema_lock(self._uri, waiting):
            from mlflow import MlflowClient

            client = MlflowClient(self._uri)
            waiting()
            experiment_id = self._find_experiment(client)
        waiting()
        self._find_run(client, experiment_id)
        waiting()
        self.log_config(client)
        self._client = client

    def log(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Sends at most `METRICS_PER_CALL` points, and tags."""
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in points]
        if metrics:
            self._client.log_batch(self.state.run_id, metrics=metrics)
        self._tag(self._client, tags)

    def advance(self, attempt: int, seq: int) -> None:
        """Notes that everything up to this event is in MLflow."""
        self._save(replace(self.state, attempt=attempt, seq=seq))

    def set_status(self, status: str, end: float | None) -> None:
        """Sets the status; a final one with its time in seconds since the epoch."""
        if status == "RUNNING":
            self._client.update_run(self.state.run_id, status=status)
        else:
            self._client.set_terminated(self.state.run_id, status, None if end is None else int(end * 1000))

    def log_config(self, client: Any = None) -> None:
        """Logs `config.yaml`, if it is there and not logged yet, as parameters and as an artifact.

        A parameter that already has another value cannot be changed in MLflow: its new value becomes a tag.
        """
        import yaml

        client = client or self._client
        try:
            content = self._run.config_file.read_bytes()
        except FileNotFoundError:
            return
        digest = hashlib.sha256(content).hexdigest()
        if digest == self.state.config_sha256:
            return
        config = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        params, note = safe_params(config if isinstance(config, dict) else {})
        self._log_params(client, params, note)
        client.log_artifact(self.state.run_id, str(self._run.config_file))
        self._save(replace(self.state, config_sha256=digest))

    def log_report(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Logs the report as artifacts, if anything has happened since it was logged last."""
        reported = f"{self.state.attempt}:{self.state.seq}"
        if reported == self.state.reported:
            return
        with tempfile.TemporaryDirectory() as folder:
            for file in write_report(self._run, Path(folder)):
                waiting()
                self._client.log_artifact(self.state.run_id, str(file))
        self._save(replace(self.state, reported=reported))

    def _log_params(self, client: Any, params: Mapping[str, str], note: str) -> None:
        from mlflow.entities import Param

        known = client.get_run(self.state.run_id).data.params
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for part in _parts(new, ENTRIES_PER_CALL):
            client.log_batch(self.state.run_id, params=part)
        changed = {key: value for key, value in params.items() if known.get(key, value) != value}
        prefix = f"attempt.{max(self._run.next_attempt() - 1, 1)}.config"
        tags = {f"{prefix}.{key}"[:MAX_TAG_KEY]: value[:MAX_TAG] for key, value in changed.items()}
        self._tag(client, tags | ({"config.note": note[:MAX_TAG]} if note else {}))

    def _tag(self, client: Any, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        for part in _parts([RunTag(key, value) for key, value in tags.items()], ENTRIES_PER_CALL):
            client.log_batch(self.state.run_id, tags=part)

    def _find_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        name = self.state.experiment
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, artifact_location=self._artifacts()))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(name)
        if found.lifecycle_stage != "active":
            raise RuntimeError(f"the experiment {name!r} has been deleted there; restore it or take another name")
        return str(found.experiment_id)

    def _artifacts(self) -> str | None:
        """Where artifacts go: beside an sqlite file; a server knows itself."""
        if self._uri.startswith(("http:", "https:", "databricks", "uc")):
            return None
        database = sqlite_file(self._uri)
        folder = self._run.path.absolute().parent if database is None else database.parent
        return (folder / "mlartifacts").as_uri()

    def _find_run(self, client: Any, experiment_id: str) -> None:
        from mlflow.exceptions import MlflowException

        if self.state.run_id:
            try:
                client.get_run(self.state.run_id)
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                # The store was emptied: everything is sent again, to a new run.
                state = self.state
                self.state = ExportState(state.tracking_uri, state.experiment, state.run_name, self._key())
        self._save(replace(self.state, experiment_id=experiment_id))  # the key is on disk before a run can carry it
        found = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{self.state.key}'", max_results=1)
        run_id = found[0].info.run_id if found else self._create_run(client, experiment_id)
        self._save(replace(self.state, run_id=run_id))

    def _create_run(self, client: Any, experiment_id: str) -> str:
        tags = {KEY_TAG: self.state.key, "mlflow.source.name": "framework.train", "mlflow.source.type": "LOCAL"}
        with contextlib.suppress(Exception):  # a container without a passwd entry has no user name
            tags["mlflow.user"] = getpass.getuser()
        started = int(self.started() * 1000)
        created = client.create_run(experiment_id, started, tags, self.state.run_name)
        return str(created.info.run_id)

    def started(self) -> float:
        """When the first attempt started, seconds since the epoch; now, if there is no journal yet."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(self._first_line())
            return float(event.get("started", event["t"]))
        return time.time()

    def _key(self) -> str:
        """The same for a run whenever it is asked for, as long as its first journal is there."""
        line = self._first_line()
        return hashlib.sha256(line).hexdigest()[:32] if line else uuid.uuid4().hex

    def _first_line(self) -> bytes:
        """The first line of the first attempt's journal: it holds times and a process id, so no two runs share it."""
        for file in sorted(self._run.events.glob("att-*/rank0.jsonl"))[:1]:
            with contextlib.suppress(OSError), file.open("rb") as stream:
                return stream.readline()
        return b""

    def _save(self, state: ExportState) -> None:
        state.write(self._run.mlflow_file)
        self.state = state


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


@contextlib.contextmanager
def _schema_lock(uri: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Lets one process at a time make or migrate the tables of an sqlite file."""
    database = sqlite_file(uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    lock, deadline = FileLock(database.with_name(f".{database.name}.lock")), time.monotonic() + LOCK_SECONDS
    while not lock.is_locked:
        try:
            lock.acquire(timeout=1.0)
        except Timeout:
            if time.monotonic() > deadline:
                raise
            waiting()
    try:
        yield
    finally:
        lock.release()
