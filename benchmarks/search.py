"""Which small recipe learns most in the same CPU seconds: runs of rows of settings, and a table of their scores.

    python benchmarks/search.py results --data clothing=clothing128 --budget 150 --seeds 0 1 2 --rows adamw muon
    python benchmarks/search.py results --table

A data set is a folder with `labels.csv` (file, split, and a label) and photos of a short side of 64 px or more. All
photos but those of the split `test` teach, without labels, and decide by cross-validation: each is classified by the
others. The split `test` is read with --split test alone, once the choice is made.

Each run is a process of its own with one thread. How many steps fit the budget is measured first, once for all seeds of
a row: its steps and those of the row `adamw` take turns in one process, so that other work on the machine slows both
alike, and the first measured cost of `adamw` is the unit. What ends is one JSON file in RESULTS; what is there is not
run again, nor what stands in the JSON lines of --known, so that anyone can continue somebody else's search. Scores
are those of the teacher's mean patch: 10 nearest neighbors (cosine, majority; each photo is left out in turn) and
logistic regression (five folds, the best of some penalties), both on photos in the middle of the frame.
After a tenth, half and all of the steps a run also records k-NN and what can be measured without labels, to see what
foretells the end (--early).
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
from contextlib import nullcontext
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
BEST = [*MUON, *FAST, *LAYERS]
SMALL = ["data.image_size=48", "optimization.batch_size=64", "clustering.prototypes=256"]
CHOSEN = [*BEST, *SMALL]
# What a row changes beside the config: see `trainer`.
STEM, LOW_FIRST = "convolutional stem", "32 px first"
ROWS: dict[str, list[str]] = {
    "untrained": [],
    "recipe of 2026-11": SMALL,
    "adamw": [],
    "adamw x2": FAST,
    "adamw layers": LAYERS,
    "muon": MUON,
    "muon x2": [*MUON, *FAST],
    "muon layers": [*MUON, *LAYERS],
    "muon x2 layers": BEST,
    "muon x4 layers": [*MUON, *LAYERS, "optimization.learning_rate=8e-3"],
    # One change of `muon x2 layers` each.
    "layer norm": [*BEST, "target.normalize=layer"],
    "no norm": [*BEST, "target.normalize=none"],
    "momentum 0.95": [*BEST, "optimization.teacher_momentum=0.95"],
    "momentum 0.99": [*BEST, "optimization.teacher_momentum=0.99"],
    "target temperature 0.04": [*BEST, "clustering.target_temperature=0.04"],
    "target temperature 0.1": [*BEST, "clustering.target_temperature=0.1"],
    "prototypes 128": [*BEST, "clustering.prototypes=128"],
    "prototypes 256": [*BEST, "clustering.prototypes=256"],
    "prototypes 1024": [*BEST, "clustering.prototypes=1024"],
    "batch 64": [*BEST, "optimization.batch_size=64"],
    "batch 256": [*BEST, "optimization.batch_size=256"],
    "predict 10": [*BEST, "masking.predict=10"],
    "predict 36": [*BEST, "masking.predict=36"],
    "ratio 0.5": [*BEST, "masking.ratio=0.5"],
    "ratio 0.8": [*BEST, "masking.ratio=0.8"],
    "crops 0.1": [*BEST, "data.crop_scale=[0.1, 1.0]"],
    "crops 0.6": [*BEST, "data.crop_scale=[0.6, 1.0]"],
    "predictor 1": [*BEST, "model.predictor.depth=1"],
    "predictor 4": [*BEST, "model.predictor.depth=4"],
    "warmup-stable-decay": [*BEST, "optimization.schedule=warmup_stable_decay"],
    "full cosine": [*BEST, "optimization.cosine_kept=1.0"],
    "registers 0": [*BEST, "model.registers=0"],
    "standard Sinkhorn": [*BEST, "clustering.sinkhorn=standard"],
    "48 px": [*BEST, "data.image_size=48"],
    "48 px, batch 64": CHOSEN,
    # One change of `48 px, batch 64` each.
    **{
        f"48 px, batch 64, {change}": [*CHOSEN, *settings]
        for change, settings in {
            "momentum 0.95": ["optimization.teacher_momentum=0.95"],
            "target temperature 0.04": ["clustering.target_temperature=0.04"],
            "target temperature 0.1": ["clustering.target_temperature=0.1"],
            "prototypes 128": ["clustering.prototypes=128"],
            "prototypes 512": ["clustering.prototypes=512"],
            "predict 10": ["masking.predict=10"],
            "predict 23": ["masking.predict=23"],
            "ratio 0.5": ["masking.ratio=0.5", "masking.predict=18"],
            "ratio 0.8": ["masking.ratio=0.8"],
            "crops 0.1": ["data.crop_scale=[0.1, 1.0]"],
            "crops 0.6": ["data.crop_scale=[0.6, 1.0]"],
            "jitter 0.5": ["data.color_jitter=0.5"],
            "predictor 1": ["model.predictor.depth=1"],
            "predictor 4": ["model.predictor.depth=4"],
            "warmup-stable-decay": ["optimization.schedule=warmup_stable_decay"],
            "full cosine": ["optimization.cosine_kept=1.0"],
            "registers 0": ["model.registers=0"],
            "standard Sinkhorn": ["clustering.sinkhorn=standard"],
            "muon x1": ["optimization.learning_rate=2e-3"],
            "width 192": ["model.width=192", "model.heads=3"],
            "depth 6": ["model.depth=6"],
            "depth 3": ["model.depth=3"],
            STEM: [],
            LOW_FIRST: [],
        }.items()
    },
    "pixels 48 px, batch 64": [*MUON, *FAST, *SMALL, "target.kind=pixels"],
    "48 px, batch 64, muon x4": [*BEST, *SMALL, "optimization.learning_rate=8e-3"],
    "48 px, batch 32": [*BEST, *SMALL, "optimization.batch_size=32"],
    "48 px, batch 64, momentum 0.99": [*BEST, *SMALL, "optimization.teacher_momentum=0.99"],
    "48 px, batch 64, last layer": [*MUON, *FAST, *SMALL],
    "48 px, batch 64, adamw": [*LAYERS, *SMALL],
    "features 48 px, batch 64": [*BEST, *SMALL, "target.kind=features"],
    "ema_head 48 px, batch 64": [*BEST, *SMALL, "target.kind=ema_head"],
    "width 192": [*BEST, "model.width=192", "model.heads=3"],
    "depth 6": [*BEST, "model.depth=6"],
    "patch 16": [*BEST, "model.patch_size=16", "masking.predict=5"],
    "jitter 0.5": [*BEST, "data.color_jitter=0.5"],
    "jitter 1": [*BEST, "data.color_jitter=1.0"],
    # Other targets with today's optimizer, and with the same optimizer and layers.
    "pixels": ["target.kind=pixels"],
    "pixels muon x2": [*MUON, *FAST, "target.kind=pixels"],
    "features": ["target.kind=features"],
    "features muon x2 layers": [*BEST, "target.kind=features"],
    "ema_head": ["target.kind=ema_head"],
    "ema_head muon x2 layers": [*BEST, "target.kind=ema_head"],
}
REFERENCE = "adamw"
EARLY = ("0.1", "0.5")
NEIGHBORS, FOLDS, STRENGTHS = 10, 5, (1e-2, 1e-1, 1.0, 10.0)
LABELS = ("label", "breed")
READ: dict[object, Any] = {}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--budget", type=float, default=150.0, help="CPU seconds of training")
    parser.add_argument("--split", choices=("train", "test"), default="train")
    parser.add_argument("--known", type=Path, help="JSON lines of runs that need not be repeated")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="on top of all rows")
    parser.add_argument("--collect", type=Path, help="write the records of RESULTS and of --known as JSON lines here")
    parser.add_argument("--table", action="store_true", help="print the scores of all rows")
    parser.add_argument("--against", default=REFERENCE, choices=ROWS, metavar="ROW", help="what --table compares with")
    parser.add_argument("--plot", type=Path, help="draw the scores of one data set against FLOP here")
    parser.add_argument("--early", action="store_true", help="print what foretells the final k-NN of a run")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.job:
        return work(json.loads(chosen.job))
    chosen.results.mkdir(parents=True, exist_ok=True)
    for job in jobs(chosen):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(chosen.results), "--job", json.dumps(job)]
        subprocess.run(command, check=True, env=environment)  # noqa: S603 - our own command
    records = [
        *read_records(chosen.known),
        *(json.loads(path.read_text()) for path in sorted(chosen.results.glob("*.json"))),
    ]
    if chosen.collect:
        lines = {name_of(record): json.dumps(record, sort_keys=True) for record in records}
        chosen.collect.write_text("".join(f"{lines[name]}\n" for name in sorted(lines)))
    if chosen.table:
        print(table(records, chosen.against))
    if chosen.plot:
        plot([record for record in records if record["kind"] == "run"], chosen.plot)
    if chosen.early:
        print(early(records))


def read_records(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def jobs(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is still to be done, the cost of steps first. A seed of all rows comes before the next seed."""
    records = {name_of(record): record for record in read_records(chosen.known)}
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
                costs = {}
                for needed in (REFERENCE, row):
                    cost = {**common, "kind": "cost", "row": needed}
                    cost_file = chosen.results / f"{name_of(cost)}.json"
                    if name_of(cost) not in records and not cost_file.exists():
                        yield {**cost, "out": str(cost_file)}
                    costs[needed] = records.get(name_of(cost)) or json.loads(cost_file.read_text())
                ratio = costs[row]["seconds"] / costs[row]["reference"]
                yield {**job, "seconds_a_step": ratio * costs[REFERENCE]["reference"], "out": str(path)}


def name_of(job: dict[str, Any]) -> str:
    changes = hashlib.sha256(json.dumps(job["set"]).encode()).hexdigest()[:6] if job["set"] else "base"
    parts = [job["kind"], job["data"], changes, job["row"].replace(" ", "_")]
    if job["kind"] == "run":
        parts += [f"{job['budget']:g}", job["split"], str(job["seed"])]
    return "-".join(parts)


def work(job: dict[str, Any]) -> None:
    """One process: a run, or the cost of a step of every row."""
    import torch

    torch.set_num_threads(1)
    record = measure_costs(job) if job["kind"] == "cost" else measure_run(job)
    described = {key: value for key, value in job.items() if key not in {"folder", "results", "out"}}
    partial = Path(job["out"]).with_suffix(".partial")
    partial.write_text(json.dumps(described | record, indent=1))
    partial.rename(job["out"])
    print(
        json.dumps({key: value for key, value in (described | record).items() if not key.endswith("right")}), flush=True
    )


def config_of(job: dict[str, Any], row: str, seed: int, steps: int) -> Any:
    from capi import load_config

    return load_config("small", [*BASE, *ROWS[row], *job["set"], f"seed={seed}", f"optimization.steps={steps}"])


def photos_of(job: dict[str, Any], split: str) -> tuple[list[Path], list[str]]:
    """Photos with their labels: those of the split `test`, or all others."""
    folder = Path(job["folder"])
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    label = next(name for name in LABELS if name in rows[0])
    chosen = sorted((row["file"], row[label]) for row in rows if (row["split"] == "test") == (split == "test"))
    return [folder / file for file, _ in chosen], [name for _, name in chosen]


def trainer(job: dict[str, Any], row: str, seed: int, steps: int) -> tuple[Any, Any]:
    """A learner, and a function that trains one step.

    Two rows are of what the package lacks: a stem of convolutions within each patch, and a first half at 32 px.
    """
    import torch
    from small_stem import stem

    from capi.data.sources import find_images
    from capi.train import build
    from capi.train.step import train_step

    config, photos = config_of(job, row, seed, steps), find_images(photos_of(job, "train")[0])
    with stem() if row.endswith(STEM) else nullcontext():
        learner = build.build_learner(config)
    batches = build.training_batches(config, photos, workers=0)
    smaller = config
    if row.endswith(LOW_FIRST):
        smaller = config_of({**job, "set": [*job["set"], "data.image_size=32", "masking.predict=9"]}, row, seed, steps)
    first = build.training_batches(smaller, photos, workers=0)
    move = build.device_mover(config, torch.device("cpu"))
    return learner, lambda step, observer=None: train_step(
        learner, [move((first if step < steps / 2 else batches)[step])], step, observer
    )


def measure_costs(job: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of a step, of a row and of the reference, by turns; the mean of several from all of a run."""
    trainers = [trainer(job, row, 0, 100)[1] for row in (job["row"], REFERENCE)]
    seconds: list[list[float]] = [[], []]
    for step in range(9):
        for train, times in zip(trainers, seconds, strict=True):
            start = time.process_time()
            train(step * 12)
            times.append(time.process_time() - start)
    # The first ones read photos that are in memory later.
    row, reference = (round(statistics.fmean(sorted(times[1:])[1:-1]), 4) for times in seconds)
    return {"seconds": row, "reference": reference}


def measure_run(job: dict[str, Any]) -> dict[str, Any]:
    from capi.method.health import HealthMonitor

    steps = 0 if job["row"] == "untrained" else max(round(job["budget"] / job["seconds_a_step"]), 1)
    learner, train = trainer(job, job["row"], job["seed"], max(steps, 1))
    before, labels = vectors(job, learner, "train")
    cpu, began, early = 0.0, time.time(), {}
    stops = {max(round(share * steps), 1): share for share in (0.1, 0.5, 1.0)}
    for step in range(steps):
        monitor = HealthMonitor() if step + 1 in stops else None
        start = time.process_time()
        metrics = train(step, monitor)
        cpu += time.process_time() - start
        if monitor:
            now, _ = vectors(job, learner, "train")
            measures = metrics.values() | monitor.values() | {"alignment": alignment(before, now)}
            rounded = {name: value and round(value, 5) for name, value in measures.items()}
            early[stops[step + 1]] = {"knn": accuracy(by_neighbors(now, labels)), **rounded}
    costs = {"steps": steps, "cpu_seconds": round(cpu, 1), "wall_seconds": round(time.time() - began)}
    return costs | {"early": early} | scores(job, learner)


def alignment(before: Any, now: Any) -> float:
    """Linear CKA of two sets of vectors of the same photos."""
    before, now = before - before.mean(0), now - now.mean(0)
    norms = (before.T @ before).norm() * (now.T @ now).norm()
    return float((before.T @ now).norm() ** 2 / norms)


def accuracy(right: Any) -> float:
    return round(100 * float(right.float().mean()), 2)


def by_neighbors(vectors: Any, labels: Any, queries: Any = None, truth: Any = None) -> Any:
    """Which photos are classified rightly by their neighbors; without queries each photo by all others."""
    import torch.nn.functional as F

    bank = F.normalize(vectors, dim=1)
    similarity = (bank if queries is None else F.normalize(queries, dim=1)) @ bank.T
    if queries is None:
        similarity.fill_diagonal_(-2)
    votes = F.one_hot(labels[similarity.topk(NEIGHBORS).indices], int(labels.max()) + 1).sum(1)
    return votes.argmax(1) == (labels if truth is None else truth)


def by_regression(vectors: Any, labels: Any, queries: Any, truth: Any) -> Any:
    """Which queries are classified rightly, for each strength of the penalty."""
    import torch

    from capi.evals.logistic import LogisticRegression

    fit = LogisticRegression(STRENGTHS, tolerance=1e-4).fit(vectors, labels)
    return torch.stack([fit.predict(queries, which) == truth for which in range(len(STRENGTHS))])


def scores(job: dict[str, Any], learner: Any) -> dict[str, Any]:
    """Accuracies, and which photos were right (bits as hex, so that runs can be compared photo by photo)."""
    import torch

    bank, labels = vectors(job, learner, "train")
    # Photos of a folder follow each other, so that each fold has a share of each class.
    fold = torch.arange(len(bank)) % FOLDS
    linear = torch.empty(len(STRENGTHS), len(bank), dtype=torch.bool)
    for number in range(FOLDS):
        held_out = fold == number
        linear[:, held_out] = by_regression(bank[~held_out], labels[~held_out], bank[held_out], labels[held_out])
    best = int(linear.sum(1).argmax())
    right = {"knn": by_neighbors(bank, labels), "linear": linear[best]}
    if job["split"] == "test":
        queries, truth = vectors(job, learner, "test")
        right = {
            "knn": by_neighbors(bank, labels, queries, truth),
            "linear": by_regression(bank, labels, queries, truth)[best],
        }
    results: dict[str, Any] = {"photos": len(right["knn"]), "strength": STRENGTHS[best]}
    for name, hits in right.items():
        bits = int("".join("1" if hit else "0" for hit in hits.tolist()), 2)
        results |= {name: accuracy(hits), f"{name}_right": f"{bits:x}"}
    return results


def vectors(job: dict[str, Any], learner: Any, split: str) -> tuple[Any, Any]:
    """The mean patch of each photo, and its class."""
    import torch

    from capi.data.sources import find_images
    from capi.evals.features import Encoding, encoded_batches

    photos, labels = photos_of(job, split)
    names = sorted(set(photos_of(job, "train")[1]))
    source, label_of = find_images(photos), {photo.name: label for photo, label in zip(photos, labels, strict=True)}
    # Photos are read once for all looks at a run.
    encoding = Encoding(batch_size=128, size=learner.image_size, image_cache=READ)
    means = [
        batch.features.feature_map.mean((1, 2))
        for batch in encoded_batches(learner.as_encoder("teacher"), source, encoding)
    ]
    classes = [names.index(label_of[source.name(number)]) for number in range(len(source))]
    return torch.cat(means), torch.tensor(classes)


def table(records: Sequence[dict[str, Any]], against: str = REFERENCE) -> str:
    """Mean and std over seeds; and against one row, photo by photo over the seeds that both have."""
    runs = {name_of(record): record for record in records if record["kind"] == "run"}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs.values():
        groups.setdefault((run["data"], run["split"], run["budget"], " ".join(run["set"]), run["row"]), []).append(run)
    lines = [
        f"| data | budget | row | seeds | steps | CPU s | k-NN | linear | k-NN over `{against}` | linear over it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = list(ROWS)
    for key, group in sorted(groups.items(), key=lambda item: (*item[0][:4], order.index(item[0][4]))):
        data, split, budget, changes, row = key
        reference = groups.get((*key[:4], against), [])
        cells = [
            f"{data} ({split})",
            f"{budget:g} {changes}".strip(),
            row,
            ", ".join(str(run["seed"]) for run in group),
        ]
        cells += [spread([run[name] for run in group], digits) for name, digits in (("steps", 0), ("cpu_seconds", 0))]
        cells += [spread([run[name] for run in group], 1) for name in ("knn", "linear")]
        cells += [difference(group, reference, name) if row != against else "-" for name in ("knn", "linear")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """k-NN and linear score against required FLOP: a panel for each model (--set), a line for each row."""
    import matplotlib.pyplot as plt

    from capi.api import planned_cost

    models = list(dict.fromkeys(" ".join(run["set"]) for run in runs))
    figure, panels = plt.subplots(
        2, len(models), figsize=(4.2 * len(models), 6.4), sharex=True, sharey="row", squeeze=False
    )
    for column, model in enumerate(models):
        of_model = [run for run in runs if " ".join(run["set"]) == model]
        for row in (row for row in ROWS if any(run["row"] == row for run in of_model)):
            points: dict[float, list[dict[str, Any]]] = {}
            for run in of_model:
                if run["row"] == row:
                    config = config_of(run, row, run["seed"], max(run["steps"], 1))
                    points.setdefault(planned_cost(config).flop, []).append(run)
            for axes, score in zip(panels[:, column], ("knn", "linear"), strict=True):
                means = [statistics.mean(run[score] for run in points[flop]) for flop in sorted(points)]
                axes.plot(sorted(points), means, "o-", label=row)
                axes.set_xscale("log")
                axes.set_ylabel({"knn": "k-NN, %", "linear": "linear, %"}[score])
        panels[0, column].set_title(model.replace(" ", "\n"), fontsize=7)
        panels[1, column].set_xlabel("FLOP of the run")
    panels[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def early(records: Sequence[dict[str, Any]]) -> str:
    """Spearman's rank correlation of each early measure with the final k-NN, over all trained runs of a data set.

    Runs with a target other than clusters lack some measures, and count where they have them.
    """
    from scipy.stats import spearmanr

    runs = [record for record in records if record["kind"] == "run" and record.get("early")]
    lines = ["| data | measured | runs | after a tenth | after half |", "|---|---|---|---|---|"]
    for data in dict.fromkeys(run["data"] for run in runs):
        of_data = [run for run in runs if run["data"] == data]
        for name in dict.fromkeys(name for run in of_data for name in run["early"]["0.1"]):
            having = [run for run in of_data if all(run["early"][share].get(name) is not None for share in EARLY)]
            if len(having) > 3:
                final = [run["knn"] for run in having]
                cells = (
                    f"{spearmanr([run['early'][share][name] for run in having], final).statistic:+.2f}"
                    for share in EARLY
                )
                lines.append(f"| {data} | {name} | {len(having)} | {' | '.join(cells)} |")
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
