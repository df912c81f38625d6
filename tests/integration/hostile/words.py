"""Command lines: what is no path, no place or no number, and configs that ask for too much."""

import os
import random
from collections.abc import Iterator

from tests.integration.hostile.making import (
    ESCAPES,
    LONG,
    Case,
    linker,
    writer,
)

LONG_PART, NUL, HALF, TURNED = "b" * 300, "a\0b", "\udcff\udcfe", "\u202egnp.cod\u2066"
NO_PATHS = [LONG, LONG_PART, f"x/{LONG_PART}/y", NUL, "", "  ", HALF, ESCAPES, TURNED, "missing", "photos/0.png/x"]
# Also where something is to be written.
NO_PLACES = [LONG, LONG_PART, NUL, "", "photos/0.png/x"]
NUMBERS = ["9" * 23, "-" + "9" * 23, "-1", "nan", "inf", "1e999", "", "9" * 5000, NUL]
LARGE = ["9" * 23, "9" * 400, "1e400", "-1", ".nan", ".inf", "[1]", "{}", "0x" + "f" * 3000, "1:" * 900 + "1"]
KEYS = [
    *("model.depth", "model.width", "model.heads", "model.patch_size", "model.registers", "model.channels"),
    *("model.mlp_ratio", "clustering.prototypes", "clustering.iterations", "clustering.queue", "clustering.chunk_mib"),
    *("optimization.steps", "optimization.batch_size", "optimization.learning_rate", "data.image_size", "seed"),
    *("data.workers", "data.cache_mib", "data.max_megapixels", "data.crop_aspect", "run.snapshots", "run.log_steps"),
    *("checkpoint.keep", "checkpoint.every_minutes", "distributed.shards", "data.mean", "masking.predict"),
]
# Values that fit each by itself, and together ask for more than there is.
TOO_MUCH = [
    ["model.depth=10000000"],
    ["model.depth=1000", "model.width=32768", "model.heads=8"],
    ["model.width=65536", "model.heads=64"],
    ["model.mlp_ratio=1e6"],
    ["clustering.prototypes=16777216", "model.predictor.width=8192", "model.predictor.heads=8"],
    ["data.image_size=65536", "model.patch_size=1"],
    ["data.image_size=65536", "model.patch_size=4096", "optimization.batch_size=16777216"],
    ["optimization.batch_size=16777216", "data.image_size=224"],
    ["model.predictor.depth=100000000"],
    ["model=" + "{a: " * 200 + "1" + "}" * 200],
    ["model=&a [*a]"],
    ["model.width=!!python/object/apply:os.system [id]"],
]
# Commands by the slot that is filled: a thing to read, a place to write, a number.
READING = [
    ["doctor", "@"],
    ["report", "@"],
    ["watch", "@"],
    ["export", "@", "--out", "out.safetensors"],
    ["push", "@", "me/model", "--dry-run"],
    ["evaluate", "@", "folder/knn", "data=photos"],
    ["evaluate", "pixels:4", "@"],
    ["evaluate", "pixels:4", "csv/knn", "data=@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "exclude=@"],
    ["predict", "pixels:4", "@", "photos", "--out", "out"],
    ["predict", "pixels:4", "probe.safetensors", "@", "--out", "out"],
    ["compare", "@", "--on", "folder/knn", "--out", "out"],
    ["compare", "pixels:4", "--on", "@", "--out", "out"],
    ["extract", "@", "photos", "--out", "out.safetensors"],
    ["extract", "pixels:4", "@", "--out", "out.safetensors"],
    ["nearest", "@", "photos/0.png"],
    ["visualize", "@", "photos", "--out", "out"],
    ["explore", "@", "photos"],
    ["data", "check", "@"],
    ["shards", "@", "--out", "out"],
    ["pretrain", "@", "--data", "photos", "--out", "out"],
    ["pretrain", "tiny4", "--data", "@", "--out", "out"],
    ["pretrain", "tiny4", "init.encoder=@", "--data", "photos", "--out", "out"],
    ["adapt", "@", "--data", "photos", "--out", "out"],
    ["adapt", "model.safetensors", "--recipe", "@", "--data", "photos", "--out", "out"],
    ["speedrun", "@", "tiny4", "--out", "out"],
    ["speedrun", "groceries", "@", "--out", "out"],
    ["speedrun", "imagenette", "tiny4", "--data", "@", "--out", "out"],
    ["plan", "@"],
    ["plan", "--suggest", "@"],
    ["recipes", "show", "@"],
    ["datasets", "show", "@"],
    ["ablate", "@", "--data", "photos", "--out", "out"],
    ["ablate", "predictor", "--data", "@", "--out", "out"],
    ["launch", "slurm", "@", "--data", "photos", "--out", "out", "--dry-run"],
    ["recipes", "--table", "@"],
    ["@"],
]
WRITING = [
    ["data", "check", "photos", "--json", "@"],
    ["shards", "photos", "--out", "@"],
    ["extract", "pixels:4", "photos", "--image-size", "8", "--out", "@.safetensors"],
    ["nearest", "missing.safetensors", "photos/0.png", "--out", "@.png"],
    ["visualize", "pixels:4", "photos", "--size", "8", "--out", "@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "--out", "@"],
    ["pretrain", "tiny4", "--data", "photos", "--out", "@"],
]
COUNTING = [
    ["shards", "photos", "--out", "out", "--shuffle", "@"],
    ["shards", "photos", "--out", "out", "--per-shard", "@"],
    ["shards", "photos", "--out", "out", "--workers", "@"],
    ["shards", "photos", "--out", "out", "--shard-size", "@"],
    ["data", "check", "photos", "--limit", "@"],
    ["data", "check", "photos", "--channels", "@"],
    ["watch", "photos", "--port", "@"],
    ["explore", "pixels:4", "--size", "@"],
    ["extract", "pixels:4", "photos", "--out", "out.safetensors", "--image-size", "@"],
    ["extract", "pixels:4", "photos", "--out", "out.safetensors", "--batch-size", "@"],
    ["extract", "pixels:4", "photos", "--out", "out", "--tile", "@"],
    ["extract", "pixels:4", "photos", "--out", "out", "--tile", "8", "--overlap", "@"],
    ["nearest", "missing.safetensors", "photos/0.png", "--count", "@"],
    ["nearest", "missing.safetensors", "photos/0.png", "--at", "@,@"],
    ["plan", "tiny4", "--gpus", "@"],
    ["plan", "tiny4", "--pue", "@"],
    ["plan", "tiny4", "--mfu", "@"],
    ["pretrain", "tiny4", "--check", "--rounds", "@"],
    ["ablate", "predictor", "--data", "photos", "--out", "out", "--seeds", "@"],
    ["launch", "slurm", "tiny4", "--data", "photos", "--out", "out", "--dry-run", "--nodes", "@"],
    ["evaluate", "pixels:@", "folder/knn", "data=photos"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "image_size=@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "encode_batch=@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "seed=@"],
    ["evaluate", "pixels:4", "folder/linear", "data=photos", "iterations=@"],
]


def words(choose: random.Random) -> Iterator[Case]:
    """Every command with something that is no path, no place or no number; and configs that ask for too much."""
    for commands, values, most in ((READING, NO_PATHS, 1), (WRITING, NO_PLACES, 1), (COUNTING, NUMBERS, 2)):
        for command in commands:
            # Behind a key nothing is null, which a value may be.
            whole = "@" in command
            for value in choose.sample([value for value in values if whole or value.strip()], most):
                filled = [word.replace("@", value) for word in command]
                # A model that cannot be opened is a cell that failed.
                codes = (1, 2) if command[0] == "compare" else (2,)
                yield Case(f"{' '.join(command)[:60]} with {value[:12]!r} of {len(value)}", filled, codes=codes)
    for key in KEYS:
        yield Case(f"plan with {key}", ["plan", "tiny4", f"{key}={choose.choice(LARGE)}"])
    for overrides in TOO_MUCH:
        yield Case(f"plan with {overrides[0][:40]}", ["plan", "tiny4", *overrides])
    for name, text in hostile_yaml():
        yield Case(f"a recipe that is {name}", ["plan", "own.yaml"], writer("own.yaml", text))
        yield Case(f"a benchmark that is {name}", ["evaluate", "pixels:4", "own.yaml"], writer("own.yaml", text))
    yield Case("a recipe that is a FIFO", ["plan", "own.yaml"], lambda folder: os.mkfifo(folder / "own.yaml"))
    yield Case("a recipe that is a device", ["plan", "own.yaml"], linker("own.yaml", "/dev/zero"))


def hostile_yaml() -> list[tuple[str, bytes]]:
    """Texts that are valid to some parser, and bad for it."""
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    return [
        ("an alias bomb", bomb.encode()),
        ("deep", b"model: " + b"[" * 100_000),
        ("deep in blocks", b"- " * 50_000),
        ("not UTF-8", b"model: \xff\xfe"),
        ("large", b"# x\n" * 2_000_000),
        ("full of the same key", b"seed: 1\n" * 50_000),
        ("full of keys", b"".join(b"key%d: 1\n" % number for number in range(50_000))),
        ("a tag", b"model: !!python/object/apply:os.system ['touch ../../outside/x']\n"),
        ("a number in base 60", b"seed: " + b"1:" * 200_000 + b"1\n"),
        ("null", b"null\n"),
        ("escapes", b'"\\e[31mkey": 1\nmodel: {"\\u202e": 1}\n'),
    ]
