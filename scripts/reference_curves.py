"""Make the file of reference curves of a recipe from finished runs that differ in their seed.

    python scripts/reference_curves.py RUN RUN RUN --out capi/report/reference_curves/demo.json

Prints how often each run, compared with the others, would count as outside of their band: false alarms.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from capi.errors import CapiError
from capi.report.references import make_reference, parse_reference
from capi.runtime.atomic import atomic_write


def main() -> None:
    """Read the runs, write the file, count false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, help="file to write; its name is that of the recipe")
    arguments = parser.parse_args()
    try:
        tree = make_reference(arguments.runs, arguments.out.stem)
    except CapiError as error:
        raise SystemExit(f"error: {error}") from error
    text = json.dumps(tree) + "\n"
    comparisons = list(parse_reference(text, str(arguments.out)).left_out())
    outside = Counter(comparison.metric for comparison in comparisons if comparison.outside)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.out, text)
    print(f"wrote {arguments.out}: {len(tree['curves'])} metrics of {len(arguments.runs)} runs, {len(text)} bytes")
    print(f"each run against the others, at each share: outside {outside.total()} of {len(comparisons)} times")
    for metric, count in outside.most_common():
        print(f"  {metric}: {count}")


if __name__ == "__main__":
    main()
