"""Print the table of metrics for docs/guides/seeing.md, or with --write put it there.

python scripts/metrics_table.py --write
"""

import argparse
from pathlib import Path

from capi.evals.results import table
from capi.train.health import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "seeing.md"
BEGIN, END = "<!-- metrics: scripts/metrics_table.py -->\n", "<!-- end -->\n"


def metrics_table() -> str:
    """A row for each metric, from the table that doctor, alarms, report, watch, progress bar and TensorBoard read."""
    rows = [
        (
            f"`{metric.key}`",
            f"{metric.title}. {metric.meaning}",
            metric.unit or "-",
            metric.better or "-",
            metric.healthy() if metric.has_range else "-",
        )
        for metric in METRICS
    ]
    return table(("in metrics.jsonl", "what it says", "unit", "better", "healthy"), rows)


def with_table(page: str) -> str:
    """The page with the present table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{metrics_table()}\n\n{END}{after}"


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(metrics_table())


if __name__ == "__main__":
    main()
