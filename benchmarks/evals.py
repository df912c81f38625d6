"""What the benchmarks say about evaluation: penalties, heads and neighbours, each against the plain way.

    python benchmarks/evals.py

Three parts, each interleaved, in one process: the grid of logistic regressions against scikit-learn, all heads of the
attentive probe against a loop, neighbours and votes for every k against a search for each. `--quick` takes tiny sizes,
to see that all of it runs.
"""

import argparse

import attentive
import logistic
import neighbors

QUICK = {
    logistic: ["--samples=1500", "--width=48", "--classes=6", "--rounds=1", "--only=overlapping"],
    attentive: ["--images=8", "--tokens=16", "--width=64", "--classes=5", "--settings=3", "--rounds=1"],
    neighbors: ["--bank=500", "--queries=64", "--width=32", "--patches=64", "--labels=20", "--rounds=1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    chosen = parser.parse_args()
    for part, words in QUICK.items():
        print(f"\n{part.__name__}\n")
        part.main(words if chosen.quick else [])


if __name__ == "__main__":
    main()
