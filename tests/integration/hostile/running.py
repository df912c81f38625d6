"""Runs each case in a fork of a process that has imported everything.

It has 5 seconds of CPU, little more memory than the process has already, and its own folder as working directory.
"""

import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.hostile.images import images
from tests.integration.hostile.making import Case, png_bytes
from tests.integration.hostile.runs import runs
from tests.integration.hostile.weights import weights
from tests.integration.hostile.words import words

GROUPS: dict[str, Callable[[random.Random], Iterator[Case]]] = {
    "words": words,
    "images": images,
    "runs": runs,
    "weights": weights,
}
SEED = 20
# Of CPU. A case that waits for something (a FIFO, a lock) uses none: it is ended by the clock.
CPU_SECONDS, WALL_SECONDS = 5, 25
# Bytes that a case may take beyond what the process has when it begins.
MORE_MEMORY = 1536 * 2**20


@dataclass
class Answer:
    """What became of a case."""

    name: str
    code: int
    cpu: float
    out: str
    err: str
    codes: tuple[int, ...]
    changed: list[str] = field(default_factory=list)
    """What was created, changed or removed outside of the case's own folder."""


def make_template(folder: Path) -> None:
    """What every case finds in its folder: photos, a run of two steps, weights, features and a probe made from it."""
    import capi
    from capi.config.files import parse_config

    for split in ("train", "test"):
        for number, kind in enumerate("ab"):
            (folder / "photos" / split / kind).mkdir(parents=True)
            for count in range(2):
                (folder / "photos" / split / kind / f"{count}.png").write_bytes(
                    png_bytes(100 * number + 20 * count + len(split))
                )
    for number in range(6):
        (folder / "photos" / f"{number}.png").write_bytes(png_bytes(40 * number))
    config = parse_config(
        {
            "data": {"image_size": 8, "workers": 0},
            "model": {"width": 16, "depth": 1, "heads": 2, "patch_size": 4, "registers": 0},
            "clustering": {"prototypes": 8},
            "masking": {"predict": 1},
            "optimization": {"batch_size": 4, "steps": 2},
            "run": {"snapshots": 1, "report": False, "loggers": []},
        }
    )
    run, photos = folder / "run", str(folder / "photos")
    capi.pretrain(config, data=photos, out=run, device="cpu")
    capi.export(run, folder / "model.safetensors")
    capi.export(run, folder / "transformers", format="transformers")
    capi.extract("pixels:4", photos, out=folder / "features.safetensors", image_size=8)
    small = [f"data={photos}", "image_size=8", "neighbors=[1]", "features=[mean_patch]", "workers=0"]
    capi.evaluate("pixels:4", "folder/knn", small, out=folder / "evaluated")
    shutil.move(folder / "evaluated" / "probe.safetensors", folder / "probe.safetensors")
    shutil.rmtree(folder / "evaluated")


def cases_of(groups: Iterable[str]) -> list[Case]:
    """The cases of some groups: always the same ones."""
    return [case for group in groups for case in GROUPS[group](random.Random(SEED))]  # noqa: S311 - a fixed seed


def snapshot(folder: Path) -> dict[str, str]:
    """Everything under a folder, with what it holds."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        link = path.is_symlink()
        content = os.readlink(path).encode() if link else path.read_bytes() if path.is_file() else b""
        hashes[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return hashes


def run_groups(groups: Iterable[str], base: Path, every: int) -> Iterator[Answer]:
    """Make and run every so many-th case, each in a fork."""
    outside, home, template = base / "outside", base / "home", base / "template"
    for folder in (outside, home, template, base / "cases"):
        folder.mkdir(parents=True)
    (outside / "private.png").write_bytes(png_bytes(200))
    (outside / "notes.txt").write_text("to be left alone")
    make_template(template)
    before = snapshot(outside), snapshot(home), sorted(os.listdir(base)), snapshot(template)
    for number, case in enumerate(cases_of(groups)[::every]):
        folder = base / "cases" / f"{number:03d}"
        shutil.copytree(template, folder, symlinks=True)
        case.prepare(folder)
        answer = run_case(case, folder)
        shutil.rmtree(folder)
        now = snapshot(outside), snapshot(home), sorted(os.listdir(base)), snapshot(template)
        if now != before or os.listdir(base / "cases"):
            answer.changed = [
                str(sorted(set(map(str, now)) ^ set(map(str, before))))[:500],
                *os.listdir(base / "cases"),
            ]
        yield answer


def run_case(case: Case, folder: Path) -> Answer:
    """One command in a fork of this process."""
    streams = [folder.parent.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        _become(case, folder, streams)
    code = _wait(child)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    out, err = (path.read_bytes().decode("utf-8", "backslashreplace") for path in streams)
    for path in streams:
        path.unlink()
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Answer(case.name, code, round(cpu, 2), out[-4000:], err[-4000:], case.codes)


def _wait(child: int) -> int:
    """The exit code, or minus the signal that ended it."""
    end = time.monotonic() + WALL_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(case: Case, folder: Path, streams: list[Path]) -> None:
    """The child's part: the command line, with limits."""
    code = 70
    try:
        os.setsid()
        for number, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(folder)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MORE_MEMORY, size + MORE_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        sys.argv = ["capi", *case.words]
        from capi.cli import main

        main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
