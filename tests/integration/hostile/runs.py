"""Run folders in which one file is not what a run writes."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.integration.hostile.making import (
    LONG,
    Case,
    as_fifo,
    as_folder,
    linker,
    png_bytes,
    writer,
)
from tests.integration.hostile.words import hostile_yaml

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LIST = "[" * 100_000 + "]" * 100_000
HOSTILE_JSON = {
    "deep": DEEP,
    "a deep list": LIST,
    "null": "null",
    "a list": "[]",
    "a number": "1" * 5000,
    "a key twice": '{"format": 1, "format": 2}',
    "nothing": "",
    "half": '{"format": 1, "da',
    "a huge version": '{"format": 1e999}',
    "a version of 400 digits": '{"format": ' + "9" * 400 + "}",
    "nulls": '{"format": null, "data": null, "starts": null, "versions": null, "step": null}',
    "nulls inside": '{"format": 1, "data": {"path": null, "images": null}, "starts": [null], "init": null}',
    "wrong types": '{"format": 1, "data": [1], "starts": {"a": 1}, "format_version": "x"}',
    "escapes": '{"format": 1, "data": {"path": "\\u001b[2J", "images": 3}, "starts": [{"device": "\\u001b[31m"}]}',
    "halves of letters": '{"format": 1, "data": {"path": "\\ud800", "fingerprint": "\\udfff"}, "starts": []}',
}
METRICS = {
    "deep": DEEP + "\n",
    "a line of 3 MB": '{"step": 1, "a": "' + "x" * 3_000_000 + '"}\n',
    "no numbers": '{"step": "x"}\n{"step": null}\n{"step": true}\n[1]\n"x"\n{"step": 1, "student_loss": {"a": []}}\n',
    "NaN": "".join(
        f'{{"step": {n}, "student_loss": {value}}}\n' for n, value in enumerate(("NaN", "Infinity", "1e999"))
    ),
    "huge steps": '{"step": 9999999999999999999999, "student_loss": 1}\n{"step": -5, "student_loss": 1}\n',
    "many keys": '{"step": 1, ' + ", ".join(f'"k{number}": 1' for number in range(100_000)) + "}\n",
    "many keys in lines": "".join(f'{{"step": {number}, "k{number}": 1}}\n' for number in range(30_000)),
    "no UTF-8": "\udcff\udcfe\n",
    "escapes": '{"step": 1, "\\u001b[2Jkey": 1, "student_loss": "\\u001b[31m"}\n',
    "a huge number": '{"step": 1, "student_loss": ' + "9" * 4000 + "}\n",
    "nothing but brackets": "[" * 3_000_000,
}


COMMANDS = {
    "doctor": ["doctor", "run"],
    "report": ["report", "run"],
    "export": ["export", "run", "--out", "out.safetensors"],
    "resume": ["pretrain", "run/config.yaml", "--data", "photos", "--out", "run", "--resume"],
    "push": ["push", "run", "me/model", "--dry-run", "--licence", "mit", "--out", "hub"],
}
# A run that can be read in part is reported in part.
ANY = (0, 1, 2)


def runs(choose: random.Random) -> Iterator[Case]:
    """A run folder in which one file is not what a run writes."""
    contents = {
        "run.json": {name: text.encode() for name, text in HOSTILE_JSON.items()},
        "config.yaml": dict(hostile_yaml()),
        "metrics.jsonl": {name: text.encode("utf-8", "surrogateescape") for name, text in METRICS.items()},
    }
    others = {
        "run.json": ("report", "resume", "push"),
        "config.yaml": ("report", "export", "push"),
        "metrics.jsonl": ("report", "resume"),
    }
    for file, texts in contents.items():
        for name, text in texts.items():
            for command in ("doctor", choose.choice(others[file])):
                yield Case(f"{command}: {file} is {name}", COMMANDS[command], writer(f"run/{file}", text), ANY)
        yield Case(f"doctor: {file} is a FIFO", COMMANDS["doctor"], as_fifo(f"run/{file}"), ANY)
        yield Case(f"report: {file} is a folder", COMMANDS["report"], as_folder(f"run/{file}"), ANY)
    for overrides in ({"depth": 10**7}, {"width": 2**40}, {"heads": 0}, {"depth": None}, {"registers": 10**12}):
        yield Case(f"export: model of {overrides}", COMMANDS["export"], _changed_config(overrides))
        yield Case(f"doctor: model of {overrides}", COMMANDS["doctor"], _changed_config(overrides), ANY)
    yield from _checkpoint_cases()
    yield from _picture_cases()
    yield from _push_cases()
    yield from _code_cases()


def _checkpoint_cases() -> Iterator[Case]:
    """The newest checkpoint, which every reader of a run opens."""
    states = {name: HOSTILE_JSON[name] for name in ("deep", "null", "a key twice", "a version of 400 digits")}
    states["a step twice"] = '{"format": 3, "step": 7, "step": 2}'
    for name, text in states.items():
        for command in ("doctor", "export"):
            yield Case(f"{command}: state.json is {name}", COMMANDS[command], _newest("state.json", text.encode()), ANY)
    yield Case("doctor: state.json is of 6 GiB", COMMANDS["doctor"], _sparse_state, ANY)
    for name, make in {
        "a file": writer("run/checkpoints/.partial-7", b""),
        "a link within the run": linker("run/checkpoints/.partial-7", "../pictures"),
        "a FIFO": as_fifo("run/checkpoints/.partial-7"),
    }.items():
        yield Case(f"resume: what an interrupted save left is {name}", COMMANDS["resume"], make, (0,))
    yield Case("export: an old index is a FIFO", COMMANDS["export"], _old_index_as_fifo)
    yield Case("export: parts of 3500 numbers of 4000 digits", COMMANDS["export"], _huge_parts)


def _checkpoint(folder: Path) -> Path:
    return max((folder / "run" / "checkpoints").glob("step_*"))


def _newest(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (_checkpoint(folder) / name).write_bytes(content) and None


def _sparse_state(folder: Path) -> None:
    with (_checkpoint(folder) / "state.json").open("r+b") as file:
        file.truncate(6 * 2**30)


def _old_index_as_fifo(folder: Path) -> None:
    """A checkpoint of format 2 with a pipe in the place of its index."""
    checkpoint = _checkpoint(folder)
    for file in checkpoint.iterdir():
        file.unlink()
    (checkpoint / "state.json").write_text('{"format": 2, "step": 2, "files": {}}')
    os.mkfifo(checkpoint / ".metadata")


def _huge_parts(folder: Path) -> None:
    checkpoint = _checkpoint(folder)
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(file)
    name = next(iter(tensors))
    sides = ", ".join(["9" * 4000] * 3500)
    save_file(tensors, file, metadata={"parts": f'{{"{name}": [[{sides}], [{sides}]]}}'})
    state = json.loads((checkpoint / "state.json").read_text())
    state["files"][file.name] = file.stat().st_size
    (checkpoint / "state.json").write_text(json.dumps(state))


def _picture_cases() -> Iterator[Case]:
    lies = '{"prototypes": [{"file": "../../x.png", "number": "a"}]}'
    for name, text in {"null": "null", "deep": DEEP, "lies": lies}.items():
        gallery = writer("run/pictures/prototypes/index.json", text.encode())
        yield Case(f"report: the gallery is {name}", COMMANDS["report"], gallery, ANY)
    yield Case("report: a share of 400 digits", COMMANDS["report"], _huge_share, ANY)
    picture = "run/pictures/snapshots/step_000000001_image_0.png"
    yield Case("report: a snapshot is a FIFO", COMMANDS["report"], as_fifo(picture), ANY)
    for name in ("deep", "null", "nulls", "half", "wrong types"):
        results = writer("results/results.json", HOSTILE_JSON[name].encode())
        yield Case(f"push: results are {name}", [*COMMANDS["push"], "--results", "results"], results, (0, 2))


def _huge_share(folder: Path) -> None:
    gallery = folder / "run" / "pictures" / "prototypes"
    gallery.mkdir(parents=True, exist_ok=True)
    (gallery / "0.png").write_bytes(png_bytes(1))
    (gallery / "index.json").write_text('{"prototypes": [{"file": "0.png", "number": 1, "share": ' + "9" * 400 + "}]}")


def _changed_config(model: dict[str, Any]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        import yaml

        path = folder / "run" / "config.yaml"
        tree = yaml.safe_load(path.read_text())
        tree["model"] |= model
        path.write_text(yaml.safe_dump(tree))

    return prepare


def _push_cases() -> Iterator[Case]:
    """Folders that `capi push` writes by itself, and texts that it reads."""
    push = ["push", "run", "me/model", "--dry-run", "--licence", "mit"]
    yield Case("push: the card of before is a FIFO", push, as_fifo("run/hub/README.md"))
    yield Case("push: the Space's card is a FIFO", [*push, "--space"], as_fifo("run/space/README.md"))
    yield Case("push: the card of before is of 6 GiB", push, _sparse_card)
    yield Case("push: the folder is a link that leads out", push, _linked_hub)
    described = [*COMMANDS["push"], "--data-description", "about.txt"]
    yield Case("push: the description is a FIFO", described, as_fifo("about.txt"))
    yield Case("push: the description is a device", [*described[:-1], "/dev/zero"])
    results = [*COMMANDS["push"], "--results", "results"]
    yield Case("push: results are a FIFO", results, as_fifo("results/results.json"))
    for picture in ("curves.png", "snapshots/step_000000001_image_0.png"):
        yield Case(f"push: {picture} is a FIFO", COMMANDS["push"], as_fifo(f"run/pictures/{picture}"), ANY)


def _sparse_card(folder: Path) -> None:
    (folder / "run" / "hub").mkdir()
    with (folder / "run" / "hub" / "README.md").open("wb") as file:
        file.truncate(6 * 2**30)


def _linked_hub(folder: Path) -> None:
    (folder / "run" / "hub").symlink_to("../../../outside")


CODE = """
from pathlib import Path

Path("../../outside/owned").touch()


def own(*arguments, **options):
    Path("../../outside/owned").touch()


class Own:
    pass
"""


def _code_cases() -> Iterator[Case]:
    """Python code that only the run folder names: it is never imported."""
    for key, name in {
        "target.kind": "Own",
        "masking.kind": "own",
        "model.predictor.kind": "Own",
        "optimization.optimizer": "own",
    }.items():
        yield Case(f"resume: {key} is code", COMMANDS["resume"], _with_code(key, f"run/evil.py:{name}"))
    for command in ("doctor", "report", "export", "push"):
        own = _with_code("target.kind", "run/evil.py:Own")
        yield Case(f"{command}: the target is code", COMMANDS[command], own, ANY)
    for name in ("/dev/zero.py:T", "../../outside/x.py:T", "\x1b[2J.py:T", "os:system", f"{LONG}.py:T", ":", "x.py:"):
        yield Case(f"resume: the target is {name[:20]!r}", COMMANDS["resume"], _with_code("target.kind", name))
    piped = [*COMMANDS["resume"], "--trust", "run/pipe.py"]
    yield Case("resume: the target is in a FIFO", piped, _with_code("target.kind", "run/pipe.py:T"))


def _with_code(key: str, name: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        import yaml

        path = folder / "run" / "config.yaml"
        tree = yaml.safe_load(path.read_text())
        *sections, last = key.split(".")
        section = tree
        for part in sections:
            section = section[part]
        section[last] = name
        path.write_text(yaml.safe_dump(tree))
        (folder / "run" / "evil.py").write_text(CODE)
        os.mkfifo(folder / "run" / "pipe.py")

    return prepare
