"""Metrics as JSON lines, one a logged step, and the loggers that get the same records.

A logger is anything that can be called with a record, a dict with the key `step`. One that comes with the package is a
line in `LOGGERS`.
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from capi.errors import CapiError
from capi.runtime.atomic import atomic_write, open_nofollow, refuse_link
from capi.runtime.documents import read_text
from capi.runtime.plugins import look_up
from capi.runtime.privacy import hide_paths
from capi.train.health import metric_of
from capi.zoo.run_folder import read_metrics

_LOG = logging.getLogger("capi")

MetricRecord = Mapping[str, float | int | None]
Logger = Callable[[MetricRecord], None]


class JsonLines:
    """Appends records to a file, each line whole before the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] = open_nofollow(path, "a", encoding="utf-8")

    def __call__(self, record: MetricRecord) -> None:
        # JSON has no NaN; null says as much.
        finite = {key: value if value is not None and math.isfinite(value) else None for key, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def cut_after(self, step: int) -> None:
        """Forget the records that a roll-back discards."""
        self._file.close()
        cut_after(self.path, step)
        self._file = open_nofollow(self.path, "a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def cut_after(path: Path, step: int) -> None:
    """Drop the records after a step: the run resumes from there and will write them again."""
    records = [record for record in read_metrics(path) if record["step"] <= step]
    atomic_write(path, "".join(json.dumps(record) + "\n" for record in records))


def tensorboard(folder: Path, start: int, config: Mapping[str, Any]) -> Logger:  # noqa: ARG001 - the contract
    """Event files in RUN/tensorboard; what an earlier start wrote after this step is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import scalar
    except ImportError as error:
        raise CapiError("TensorBoard files need an extra: pip install 'capi[tensorboard]'") from error

    class TensorBoard:
        def __init__(self) -> None:
            self.cut_after(start)

        def __call__(self, record: MetricRecord) -> None:
            for key, value in record.items():
                if key != "step" and value is not None:
                    summary = scalar(key, value)
                    metric = metric_of(key)
                    summary.value[0].metadata.display_name = metric.title
                    summary.value[0].metadata.summary_description = metric.description
                    self.writer._get_file_writer().add_summary(summary, record["step"])

        def cut_after(self, step: int) -> None:
            refuse_link(folder / "tensorboard")
            # Files are read in the order of their names, which hold the second and then a count without leading zeros.
            names = sorted(path.name for path in (folder / "tensorboard").glob("events.out.tfevents.*"))
            while names and f".{int(time.time())}." in names[-1]:
                time.sleep(0.05)
            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

        def close(self) -> None:
            self.writer.close()

    return TensorBoard()


def wandb(folder: Path, start: int, config: Mapping[str, Any]) -> Logger:  # noqa: ARG001
    """Weights & Biases, one run for the folder, continued when it is resumed."""
    try:
        import wandb as library
    except ImportError as error:
        raise CapiError("logging to Weights & Biases needs an extra: pip install 'capi[wandb]'") from error
    number = _identifier(folder / ".wandb-id", lambda: secrets.token_hex(8))
    run = library.init(dir=str(folder), name=folder.name, id=number, resume="allow", config=hide_paths(config))

    def log(record: MetricRecord) -> None:
        run.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])

    log.close = run.finish  # type: ignore[attr-defined]
    return log


def _identifier(file: Path, create: Callable[[], str]) -> str:
    """The run's own name at a tracker, since folders of other runs may have the same one; the first start makes it."""
    if not file.exists():
        atomic_write(file, create())
    return read_text(file)


class _MlflowRun:
    """A logger that stops at the first failure: a server that is gone would hold up every later step."""

    def __init__(self, client: Any, number: str) -> None:
        self.client, self.number, self.failed = client, number, False

    def __call__(self, record: MetricRecord) -> None:
        from mlflow.entities import Metric

        now, step = int(1000 * time.time()), int(record["step"] or 0)
        values = {key: value for key, value in record.items() if key != "step" and value is not None}
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        self._try(lambda: self.client.log_batch(self.number, metrics=metrics))

    def close(self) -> None:
        self._try(lambda: self.client.set_terminated(self.number))

    def _try(self, action: Callable[[], object]) -> None:
        from mlflow.exceptions import MlflowException

        if self.failed:
            return
        try:
            action()
        except MlflowException as error:
            self.failed = True
            _LOG.warning("MLflow gets no more metrics of this run (%s); metrics.jsonl has all of them", error)


def mlflow(folder: Path, start: int, config: Mapping[str, Any]) -> Logger:  # noqa: ARG001
    """MLflow, on the server of MLFLOW_TRACKING_URI, else as files in RUN/mlflow; one run for the folder."""
    try:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise CapiError("logging to MLflow needs an extra: pip install 'capi[mlflow]'") from error
    store = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").resolve().as_uri()
    if store.startswith("file:"):
        # MLflow 3 writes files only where this is set; its database needs a dozen more packages.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=store)

    def create() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "capi")
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        identifier: str = client.create_run(number, run_name=folder.name).info.run_id
        params = [Param(key, str(value)[:6000]) for key, value in _flat(hide_paths(config))]
        # A hundred is what the server takes at once.
        for first in range(0, len(params), 100):
            client.log_batch(identifier, params=params[first : first + 100])
        return identifier

    try:
        number = _identifier(folder / ".mlflow-id", create)
        client.update_run(number, status="RUNNING")
    except MlflowException as error:
        raise CapiError(f"MLflow cannot write to {store} ({error}): set MLFLOW_TRACKING_URI, or start it") from error

    return _MlflowRun(client, number)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested sections by dotted keys, as on the command line."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def trackio(folder: Path, start: int, config: Mapping[str, Any]) -> Logger:  # noqa: ARG001
    """Trackio, in the project TRACKIO_PROJECT of its own folder on this machine; one run for the folder."""
    try:
        import trackio as library
    except ImportError as error:
        raise CapiError("logging to Trackio needs an extra: pip install 'capi[trackio]'") from error
    name = _identifier(folder / ".trackio-id", lambda: f"{folder.name}-{secrets.token_hex(4)}")
    # What it prints is no result of a command.
    with contextlib.redirect_stdout(sys.stderr):
        run = library.init(
            project=os.environ.get("TRACKIO_PROJECT", "capi"),
            name=name,
            resume="allow",
            config=hide_paths(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(record: MetricRecord) -> None:
        run.log({key: value for key, value in record.items() if key != "step"}, step=int(record["step"] or 0))

    def finish() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            library.finish()

    log.close = finish  # type: ignore[attr-defined]
    return log


LOGGERS: dict[str, Callable[[Path, int, Mapping[str, Any]], Logger]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
}


def require_loggers(names: Sequence[str]) -> None:
    """Raise where a logger or its library is missing, before anything is written."""
    for name in names:
        look_up(LOGGERS, name, "run.loggers", files=False)
        if importlib.util.find_spec(name) is None:
            raise CapiError(f"run.loggers has {name}, which needs an extra: pip install 'capi[{name}]'")


def close(logger: Logger) -> None:
    """Let a logger finish, if it has something to finish."""
    getattr(logger, "close", lambda: None)()
