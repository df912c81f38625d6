"""Which small recipe learns most in the same CPU seconds: runs of rows of settings, and a table of their scores.

    python benchmarks/search.py results --data clothing=clothing128 --budget 150 --seeds 0 1 2 --rows adamw muon
    python benchmarks/search.py results --table

A data set is a folder with `labels.csv` (file, split, and a label) and photos of a short side of 64 px or more. Photos
of the split `train` teach; those of `val` decide, or a tenth of `train`, by the hash of the file's name, where there is
none. The split `test` is read with --split test alone, once the choice is made.

Each run is a process of its own with one thread. How many steps fit the budget is measured first, for all rows of a
data set by turns in one process, so that other work on the machine slows all alike; it is kept, so that each seed of a
row has as many steps. What ends is one JSON file in RESULTS; what is there is not run again, nor what stands in the
JSON lines of --known, so that anyone can go on with somebody else's search. Scores are those of the teacher's mean
patch: 10 nearest neighbours (cosine, majority) and logistic regression, both on photos in the middle of the frame.
"""

import argparse
import csv
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Everything that the rows have in common is written out, so that a later change of a recipe does not change a row.
BASE = [
    *("data.image_size=64", "data.crop_scale=[0.3, 1.0]", "data.workers=0", "data.cache_mib=512"),
    *("model.width=128", "model.depth=4", "model.heads=2", "model.patch_size=8", "model.registers=4"),
    *("model.stochastic_depth=0.0", "model.predictor.depth=2", "masking.predict=20", "clustering.prototypes=512"),
    *("optimization.batch_size=128", "optimization.learning_rate=2e-3", "optimization.teacher_momentum=0.97"),
    *("optimization.optimizer=adamw", "target.layers=last", "target.normalize=none"),
]
MUON, FAST = ["optimization.optimizer=muon"], ["optimization.learning_rate=4e-3"]
LAYERS = ["target.layers=all", "target.normalize=instance"]
ROWS: dict[str, list[str]] = {
    "untrained": [],
    "recipe of 2026-11": ["data.image_size=48", "optimization.batch_size=64", "clustering.prototypes=256"],
    "adamw": [],
    "adamw x2": FAST,
    "adamw layers": LAYERS,
    "muon": MUON,
    "muon x2": [*MUON, *FAST],
    "muon layers": [*MUON, *LAYERS],
    "muon x2 layers": [*MUON, *FAST, *LAYERS],
    "pixels": ["target.kind=pixels"],
    "pixels muon x2": [*MUON, *FAST, "target.kind=pixels"],
    "features": ["target.kind=features"],
    "features muon x2 layers": [*MUON, *FAST, *LAYERS, "target.kind=features"],
    "ema_head": ["target.kind=ema_head"],
    "ema_head muon x2 layers": [*MUON, *FAST, *LAYERS, "target.kind=ema_head"],
}
NEIGHBOURS, STRENGTHS = 10, (1e-3, 1e-2, 1e-1, 1.0)
LABELS = ("label", "breed")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--budget", type=float, default=150.0, help="CPU seconds of training")
    parser.add_argument("--split", choices=("val", "test"), default="val")
    parser.add_argument("--known", type=Path, help="JSON lines of runs that need not be repeated")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="on top of all rows")
    parser.add_argument("--collect", type=Path, help="write the records of RESULTS and of --known as JSON lines here")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.job:
        return work(json.loads(chosen.job))
    chosen.results.mkdir(parents=True, exist_ok=True)
    for job in jobs(chosen):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(chosen.results), "--job", json.dumps(job)]
        subprocess.run(command, check=True, env=environment)  # noqa: S603 - our own command
    records = [*known(chosen.known), *(json.loads(path.read_text()) for path in sorted(chosen.results.glob("*.json")))]
    if chosen.collect:
        lines = {name_of(record): json.dumps(record, sort_keys=True) for record in records}
        chosen.collect.write_text("".join(f"{lines[name]}\n" for name in sorted(lines)))
    if chosen.table:
        print(table(records))


def known(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def jobs(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is still to be done, the cost of steps first. A seed of all rows comes before the next seed."""
    records = {name_of(record): record for record in known(chosen.known)}
    for name, _, folder in (entry.partition("=") for entry in chosen.data):
        common = {
            "data": name,
            "folder": folder,
            "set": chosen.set,
            "split": chosen.split,
            "results": str(chosen.results),
        }
        for seed in chosen.seeds:
            for row in chosen.rows:
                job = {**common, "kind": "run", "row": row, "seed": seed, "budget": chosen.budget}
                path = chosen.results / f"{name_of(job)}.json"
                if path.exists() or name_of(job) in records:
                    continue
                cost = {**common, "kind": "cost", "rows": list(ROWS)}
                costs = chosen.results / f"{name_of(cost)}.json"
                if name_of(cost) in records and not costs.exists():
                    costs.write_text(json.dumps(records[name_of(cost)]))
                if not costs.exists():
                    yield {**cost, "out": str(costs)}
                yield {**job, "seconds_a_step": json.loads(costs.read_text())["seconds"][row], "out": str(path)}


def name_of(job: dict[str, Any]) -> str:
    changes = hashlib.sha256(json.dumps(job["set"]).encode()).hexdigest()[:6] if job["set"] else "base"
    parts = [job["kind"], job["data"], changes]
    if job["kind"] == "run":
        parts += [job["row"].replace(" ", "_"), f"{job['budget']:g}", job["split"], str(job["seed"])]
    return "-".join(parts)


def work(job: dict[str, Any]) -> None:
    """One process: a run, or the cost of a step of every row."""
    import torch

    torch.set_num_threads(1)
    record = measure_costs(job) if job["kind"] == "cost" else measure_run(job)
    kept = {key: value for key, value in job.items() if key not in {"folder", "results", "out", "rows"}}
    partial = Path(job["out"]).with_suffix(".partial")
    partial.write_text(json.dumps(kept | record, indent=1))
    partial.rename(job["out"])
    print(json.dumps({key: value for key, value in (kept | record).items() if not key.endswith("right")}), flush=True)


def config_of(job: dict[str, Any], row: str, seed: int, steps: int) -> Any:
    from capi import load_config

    return load_config("small", [*BASE, *ROWS[row], *job["set"], f"seed={seed}", f"optimization.steps={steps}"])


def photos_of(job: dict[str, Any], split: str) -> tuple[list[Path], list[str]]:
    """Photos of a split with their labels."""
    folder = Path(job["folder"])
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    label = next(name for name in LABELS if name in rows[0])
    has_val = any(row["split"] == "val" for row in rows)

    def split_of(row: dict[str, str]) -> str:
        held_out = int(hashlib.sha256(row["file"].encode()).hexdigest(), 16) % 10 == 0
        return "val" if not has_val and row["split"] == "train" and held_out else row["split"]

    chosen = sorted((row["file"], row[label]) for row in rows if split_of(row) == split)
    return [folder / file for file, _ in chosen], [name for _, name in chosen]


def trainer(job: dict[str, Any], row: str, seed: int, steps: int) -> tuple[Any, Any]:
    """A learner, and a function that trains one step."""
    import torch

    from capi.data.sources import find_images
    from capi.train import build
    from capi.train.step import train_step

    config = config_of(job, row, seed, steps)
    learner = build.build_learner(config)
    batches = build.training_batches(config, find_images(photos_of(job, "train")[0]), workers=0)
    move = build.device_mover(config, torch.device("cpu"))
    return learner, lambda step: train_step(learner, [move(batches[step])], step)


def measure_costs(job: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of a step, the median of several; every round takes one of each row."""
    trainers = {row: trainer(job, row, 0, 100)[1] for row in job["rows"]}
    seconds: dict[str, list[float]] = {row: [] for row in trainers}
    for step in range(6):
        for row, train in trainers.items():
            start = time.process_time()
            train(step)
            seconds[row].append(time.process_time() - start)
    # The first ones read photos that are in memory later.
    return {"seconds": {row: round(statistics.median(times[1:]), 4) for row, times in seconds.items()}}


def measure_run(job: dict[str, Any]) -> dict[str, Any]:
    steps = 0 if job["row"] == "untrained" else max(round(job["budget"] / job["seconds_a_step"]), 1)
    learner, train = trainer(job, job["row"], job["seed"], max(steps, 1))
    start, began = time.process_time(), time.time()
    losses = [train(step).student_loss for step in range(steps)]
    cpu, wall = time.process_time() - start, time.time() - began
    costs = {"steps": steps, "cpu_seconds": round(cpu, 1), "wall_seconds": round(wall)}
    return costs | {"last_loss": round(float(losses[-1]), 4) if losses else None} | scores(job, learner)


def scores(job: dict[str, Any], learner: Any) -> dict[str, Any]:
    """Accuracies, and which photos were right (bits as hex, so that runs can be compared photo by photo)."""
    import torch
    import torch.nn.functional as F

    from capi.evals.logistic import LogisticRegression

    (bank, labels), (queries, truth) = (vectors(job, learner, split) for split in ("train", job["split"]))
    names = sorted(set(labels))
    label_index = torch.tensor([names.index(one) for one in labels])
    wanted = torch.tensor([names.index(one) if one in names else -1 for one in truth])
    near = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).topk(NEIGHBOURS).indices
    by_neighbours = F.one_hot(label_index[near], len(names)).sum(1).argmax(1) == wanted
    # The strength of the penalty is chosen on a part of the training photos.
    held_out = torch.arange(len(bank)) % 5 == 0
    part = LogisticRegression(STRENGTHS, tolerance=1e-5).fit(bank[~held_out], label_index[~held_out])
    fits = [(part.predict(bank[held_out], which) == label_index[held_out]).sum() for which in range(len(STRENGTHS))]
    best = STRENGTHS[int(torch.stack(fits).argmax())]
    whole = LogisticRegression((best,), tolerance=1e-5).fit(bank, label_index)
    linear = whole.predict(queries) == wanted
    found: dict[str, Any] = {"photos": len(truth), "strength": best}
    for name, right in (("knn", by_neighbours), ("linear", linear)):
        bits = int("".join("1" if one else "0" for one in right.tolist()), 2)
        found |= {name: round(100 * float(right.float().mean()), 2), f"{name}_right": f"{bits:x}"}
    return found


def vectors(job: dict[str, Any], learner: Any, split: str) -> tuple[Any, list[str]]:
    """The mean patch of each photo, and its label."""
    import torch

    from capi.data.sources import find_images
    from capi.evals.features import Encoding, encoded_batches

    photos, labels = photos_of(job, split)
    source, label_of = find_images(photos), {photo.name: label for photo, label in zip(photos, labels, strict=True)}
    encoding = Encoding(batch_size=128, size=learner.image_size)
    means = [
        batch.features.feature_map.mean((1, 2))
        for batch in encoded_batches(learner.as_encoder("teacher"), source, encoding)
    ]
    return torch.cat(means), [label_of[source.name(number)] for number in range(len(source))]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Mean and std over seeds; and against the row `adamw`, photo by photo over the seeds that both have."""
    runs = {name_of(record): record for record in records if record["kind"] == "run"}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs.values():
        groups.setdefault((run["data"], run["split"], run["budget"], " ".join(run["set"]), run["row"]), []).append(run)
    lines = [
        "| data | budget | row | seeds | steps | CPU s | k-NN | linear | k-NN over adamw | linear over adamw |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = list(ROWS)
    for key, group in sorted(groups.items(), key=lambda item: (*item[0][:4], order.index(item[0][4]))):
        data, split, budget, changes, row = key
        reference = groups.get((*key[:4], "adamw"), [])
        cells = [
            f"{data} ({split})",
            f"{budget:g} {changes}".strip(),
            row,
            ", ".join(str(run["seed"]) for run in group),
        ]
        cells += [spread([run[name] for run in group], digits) for name, digits in (("steps", 0), ("cpu_seconds", 0))]
        cells += [spread([run[name] for run in group], 1) for name in ("knn", "linear")]
        cells += [difference(group, reference, name) if row != "adamw" else "-" for name in ("knn", "linear")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and digits else mean


def difference(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], name: str) -> str:
    """Points, with the standard error over photos, whose differences are averaged over seeds first."""
    paired = [(run, other) for run in ours for other in theirs if run["seed"] == other["seed"]]
    if not paired:
        return "-"
    photos = paired[0][0]["photos"]

    def right(run: dict[str, Any]) -> list[int]:
        return [int(bit) for bit in bin(int(run[f"{name}_right"], 16))[2:].zfill(photos)]

    rows = [[a - b for a, b in zip(right(run), right(other), strict=True)] for run, other in paired]
    each = [statistics.mean(column) for column in zip(*rows, strict=True)]
    return f"{100 * statistics.mean(each):+.1f} ± {100 * statistics.stdev(each) / photos**0.5:.1f}"


if __name__ == "__main__":
    main()
