"""Does adapting pay: frozen, adapted and trained from scratch, each with the same CPU seconds on the same photos.

    python benchmarks/adapt_study.py results --source clothing=clothing128 --data pets=pets128 --seeds 0 1 2
    python benchmarks/adapt_study.py results --source clothing=clothing128 --data pets=pets128 --table

General weights are stood in for by an encoder that is trained here, on the photos of --source, for --source-budget CPU
seconds; it is a run of capi in RESULTS, which resumes. Each row then trains on the photos of --data that are not of the
split `test`, without labels, and is scored on that split: 10 nearest neighbors, a linear and an attentive probe, as
`capi evaluate` does it. On the way k-NN is looked at within the training photos, for the curves.

Everything else is as in search.py, whose data sets, costs of steps and vectors these are: a process and a JSON file for
each run, one thread, no run twice.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from search import BASE, BEST, LAYERS, SMALL, accuracy, by_neighbors, photos_of, spread, vectors

# The source and `scratch` are trained as the recipe `small` trains.
START = [*BASE, *BEST, *SMALL]
# The photos, masks, batches and prototypes of all rows; sizes are those of the source.
COMMON = ("data.", "masking.", "clustering.prototypes", "model.predictor", "optimization.batch_size")
SHARED = [each for each in START if each.startswith(COMMON)]
FASTER = ["optimization.learning_rate=2e-3", "adapt.rate_multiplier=0.5", "optimization.teacher_momentum=0.97"]
ADAPTED: dict[str, list[str]] = {
    "adapted": [],
    "adapted faster": FASTER,
    "all layers": [*FASTER, *LAYERS],
    "all layers, muon": [*FASTER, *LAYERS, "optimization.optimizer=muon"],
    "last 2 blocks": [*FASTER, *LAYERS, "adapt.blocks=2"],
    "LoRA of rank 8": [*FASTER, *LAYERS, "adapt.lora_rank=8"],
    "pulled back": [*FASTER, *LAYERS, "adapt.pull=0.1"],
}
ROWS = ("frozen", "scratch", *ADAPTED)
SHARES = (0.1, 0.25, 0.5, 1.0)
SCORES = ("knn", "linear", "attentive")
# Settings of the probes that were chosen most often at this scale; the paper's grid would take longer than the runs.
PROBES = ["learning_rates=[1e-3, 5e-3]", "weight_decays=[5e-4]", "schedule=small", "save_probe=false"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--source", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--data", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--budget", type=float, default=150.0, help="CPU seconds of training")
    parser.add_argument("--source-budget", type=float, default=1200.0, help="CPU seconds of the source's training")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="on top of all rows and the source")
    parser.add_argument("--table", action="store_true", help="print what there is, and run nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves of what there is")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.job:
        return work(json.loads(chosen.job))
    chosen.results.mkdir(parents=True, exist_ok=True)
    for job in () if chosen.table else jobs(chosen):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *(arguments or sys.argv[1:]), "--job", json.dumps(job)]
        subprocess.run(command, check=True, env=environment)  # noqa: S603 - our own command
    records = [json.loads(path.read_text()) for path in sorted(chosen.results.glob("run-*.json"))]
    print(table(records))
    if chosen.plot:
        plot(records, chosen.plot)


def jobs(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is still to be done: the cost of a step of each row, the source, then all rows of a seed before the next."""
    source, folders = chosen.results / "source", (entry.partition("=")[2] for entry in (chosen.source, chosen.data))
    common = {"set": chosen.set, "source": str(source), **dict(zip(("source_folder", "folder"), folders, strict=True))}
    started = chosen.results / "source.json"
    if not started.exists():
        yield {**common, "kind": "source", "budget": chosen.source_budget, "out": str(started)}
    costs = chosen.results / "costs.json"
    if not costs.exists():
        yield {**common, "kind": "costs", "out": str(costs)}
    seconds = json.loads(costs.read_text())["seconds"]
    for seed in chosen.seeds:
        for row in chosen.rows:
            # The frozen encoder is the same for all seeds.
            drawn = 0 if row == "frozen" else seed
            out = chosen.results / f"run-{row.replace(' ', '_')}-{chosen.budget:g}-{drawn}.json"
            if not out.exists():
                job = {**common, "kind": "run", "row": row, "seed": drawn, "budget": chosen.budget, "out": str(out)}
                yield job | {"steps": 0 if row == "frozen" else max(round(chosen.budget / seconds[row]), 1)}


def work(job: dict[str, Any]) -> None:
    """One process: the source, the costs, or a run."""
    import torch

    torch.set_num_threads(1)
    kinds = {"source": train_source, "costs": measure_costs, "run": measure_run}
    record = {key: value for key, value in job.items() if "folder" not in key and key not in ("source", "out")}
    record |= kinds[job["kind"]](job)
    partial = Path(job["out"]).with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1))
    partial.rename(job["out"])
    print(json.dumps(record), flush=True)


def train_source(job: dict[str, Any]) -> dict[str, Any]:
    """The stand-in for published weights: a run like any other, of as many steps as fit the budget."""
    import capi

    out = Path(job["source"])
    if (out / "config.yaml").exists():
        config = capi.load_config(str(out / "config.yaml"))
    else:
        seconds = time_steps([trainer({**job, "folder": job["source_folder"]}, "scratch", 0, 100)[1]])[0]
        steps = f"optimization.steps={max(round(job['budget'] / seconds), 1)}"
        run = ["run.snapshots=0", "run.report=false", "run.loggers=[]", "checkpoint.every_minutes=2"]
        config = capi.load_config("small", [*START, *job["set"], *run, steps])
    # Of a table those of the split `train` are read.
    photos = Path(job["source_folder"]) / "labels.csv"
    done = capi.pretrain(config, data=photos, out=out, resume=True, device="cpu")
    if not done.finished:
        raise SystemExit("stopped: the same command resumes")
    return {"steps": done.step}


def trainer(job: dict[str, Any], row: str, seed: int, steps: int) -> tuple[Any, Any]:
    """A learner, and a function that trains one step."""
    import torch

    from capi.api import adapted_config, load_config, train_step
    from capi.data.sources import find_images
    from capi.train import build
    from capi.train.initial_weights import initialize

    length = [f"seed={seed}", f"optimization.steps={max(steps, 1)}"]
    if row == "scratch":
        config = load_config("small", [*START, *job["set"], *length])
    else:
        changes = [*SHARED, *ADAPTED.get(row, []), *job["set"], *length]
        config = adapted_config(job["source"], changes)
    learner = build.build_learner(config)
    initialize(learner, config)
    batches = build.training_batches(config, find_images(photos_of(job, "train")[0]), workers=0)
    move = build.device_mover(config, torch.device("cpu"))
    return learner, lambda step: train_step(learner, [move(batches[step])], step)


def measure_costs(job: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of a step of each row. They take turns, so that other work on the machine slows all alike."""
    names = [row for row in ROWS if row != "frozen"]
    seconds = time_steps([trainer(job, row, 0, 100)[1] for row in names])
    return {"seconds": dict(zip(names, seconds, strict=True))}


def time_steps(trainers: Sequence[Any], rounds: int = 9) -> list[float]:
    times: list[list[float]] = [[] for _ in trainers]
    for step in range(rounds):
        for train, own in zip(trainers, times, strict=True):
            start = time.process_time()
            train(step)
            own.append(time.process_time() - start)
    # The first ones read photos that are in memory later.
    return [round(statistics.median(own[2:]), 4) for own in times]


def measure_run(job: dict[str, Any]) -> dict[str, Any]:
    steps = job["steps"]
    learner, train = trainer(job, job["row"], job["seed"], steps)
    curve, cpu, began = {"0": look(job, learner)}, 0.0, time.time()
    stops = {max(round(share * steps), 1): share for share in SHARES} if steps else {}
    for step in range(steps):
        start = time.process_time()
        train(step)
        cpu += time.process_time() - start
        if step + 1 in stops:
            curve[f"{stops[step + 1]:g}"] = look(job, learner)
    costs = {"cpu_seconds": round(cpu, 1), "wall_seconds": round(time.time() - began)}
    return costs | {"curve": curve} | scores(job, learner)


def look(job: dict[str, Any], learner: Any) -> float:
    """k-NN of each training photo among all others."""
    return accuracy(by_neighbors(*vectors(job, learner, "train")))


def scores(job: dict[str, Any], learner: Any) -> dict[str, Any]:
    import csv

    import capi

    table = Path(job["folder"]) / "labels.csv"
    with table.open(newline="") as file:
        label = next(name for name in ("label", "breed") if name in (csv.DictReader(file).fieldnames or ()))
    places: dict[str, Any] = {"data": str(table), "label": label, "train": "train", "tests": ["test"], "workers": 0}
    scores = {}
    for protocol in SCORES:
        more = ["neighbors=[10]", "votes=[majority]"] if protocol == "knn" else PROBES
        # A vector of the patches alone, since predictors are older in some rows than in others.
        more = more if protocol == "attentive" else [*more, "features=[mean_patch]"]
        done = capi.evaluate(learner, f"csv/{protocol}", more, device="cpu", **places)
        scores[protocol] = round(100 * next(iter(done.record["scores"].values())), 2)
    return scores


def table(records: Sequence[dict[str, Any]]) -> str:
    """Mean and std over seeds: the scores, then the curves."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["budget"], record["row"]), []).append(record)
    order = sorted(groups, key=lambda key: (key[0], ROWS.index(key[1])))
    lines = [
        "| budget | row | seeds | steps | CPU s | k-NN | linear | attentive |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in order:
        group = groups[key]
        cells = [f"{key[0]:g}", key[1], ", ".join(str(run["seed"]) for run in group)]
        cells += [spread([run[name] for run in group], 0) for name in ("steps", "cpu_seconds")]
        lines.append(f"| {' | '.join([*cells, *(spread([run[name] for run in group], 1) for name in SCORES)])} |")
    shares = ["0", *(f"{share:g}" for share in SHARES)]
    lines += ["", "k-NN within the training photos, by the share of the steps:", ""]
    lines += [f"| budget | row | {' | '.join(shares)} |", f"|{'---|' * (len(shares) + 2)}"]
    for key in order:
        values = [[run["curve"][share] for run in groups[key] if share in run["curve"]] for share in shares]
        cells = [f"{key[0]:g}", key[1], *(spread(each, 1) if each else "" for each in values)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """k-NN within the training photos over the CPU seconds of training, mean and range over the seeds of each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for row in (row for row in ROWS if any(record["row"] == row for record in records)):
        curves = [record["curve"] for record in records if record["row"] == row]
        budget = next(record["budget"] for record in records if record["row"] == row)
        shares = sorted({share for curve in curves for share in curve}, key=float)
        values = [[curve[share] for curve in curves if share in curve] for share in shares]
        if shares == ["0"]:
            axes.axhline(values[0][0], color="black", linestyle="--", linewidth=1, label=row)
            continue
        seconds = [float(share) * budget for share in shares]
        (line,) = axes.plot(seconds, [statistics.mean(each) for each in values], marker="o", markersize=3, label=row)
        low, high = [min(each) for each in values], [max(each) for each in values]
        axes.fill_between(seconds, low, high, color=line.get_color(), alpha=0.15)
    axes.set_xlabel("CPU seconds of training")
    axes.set_ylabel("k-NN within the training photos (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
