"""Runs as data, for tests of the pages that show them."""

import numpy as np

from capi.report.pages.data import Column, Emergence, Picture, PrototypeStrip, RunReport, RunState
from capi.train.health import RunFacts, Watchman
from tests.report.run_folders import records

# A PNG of one pixel.
PIXEL = Picture(
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==",
    1,
    1,
)
FACTS = RunFacts(prototypes=256, width=128, total_steps=60)


def column(*values: float, every: int = 5) -> Column:
    return Column(np.arange(1, len(values) + 1, dtype=np.int64) * every, np.array(values, dtype=np.float64))


def run_report(name: str = "run", **others: float | None) -> RunReport:
    """A finished run with every section filled."""
    logged = records(**others)
    watchman = Watchman(FACTS)
    for record in logged:
        watchman.see(record)
    keys = {key for record in logged for key in record if key != "step"}
    columns = {
        key: _column([(record["step"], record[key]) for record in logged if key in record]) for key in sorted(keys)
    }
    return RunReport(
        name=name,
        state=RunState("finished", 60, 60),
        columns=columns,
        findings=watchman.findings(),
        past=watchman.past,
        emergence=[Emergence(0, PIXEL, [(0, PIXEL), (60, PIXEL)])],
        prototypes=[PrototypeStrip(7, 0.05, PIXEL)],
        cost=[("Time", "2 minutes")],
        assumptions=["A guess."],
        config="seed: 0\nmodel:\n  width: 128\n",
        provenance=[("Command", "capi demo")],
    )


def _column(points: list[tuple[int, float | None]]) -> Column:
    values = [np.nan if value is None else value for _, value in points]
    return Column(np.array([step for step, _ in points], np.int64), np.array(values, np.float64))
