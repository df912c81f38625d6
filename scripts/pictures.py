"""Draw the pictures of README and docs from a run of the demo (`make pictures`).

    python scripts/pictures.py demo_run

Pictures of pages are screenshots of a real browser (Chromium, through playwright).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image

import capi
from capi.method.masking import MASKS, Grid, roll
from capi.report.snapshots import photo_path, picture_path, snapshot_steps
from capi.runtime.randomness import sample_keys

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
# The paper's grid at 224 px and patch 16, and what its recipe hides.
GRID, HIDDEN = Grid(14, 14), int(14 * 14 * 0.65)
HIDDEN_COLOR = mpl.colors.ListedColormap(["#f2c14e", "#30475e"])
PORT = 7899
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """All pictures, or those that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run of the demo")
    parser.add_argument("--only", nargs="+", choices=DRAWN, default=list(DRAWN), metavar="NAME", help=", ".join(DRAWN))
    arguments = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    for name in arguments.only:
        path = DRAWN[name](arguments.run)
        print(f"wrote {path} ({path.stat().st_size // 1024} KiB)")


def before_after(run: Path) -> Path:
    """Photos, and the first three principal components of their patches: untrained, on the way, trained."""
    folder = run / "pictures" / "snapshots"
    steps = snapshot_steps(folder)
    chosen = [steps[0], steps[len(steps) // 2], steps[-1]]
    numbers = [number for number in range(8) if photo_path(folder, number).exists()][:6]
    figure, axes = pyplot.subplots(4, len(numbers), figsize=(1.5 * len(numbers), 6.1), layout="constrained")
    for column, number in enumerate(numbers):
        paths = [photo_path(folder, number), *(picture_path(folder, step, number) for step in chosen)]
        for row, path in enumerate(paths):
            axes[row, column].imshow(np.asarray(Image.open(path).convert("RGB")), interpolation="nearest")
    titles = ("photo", "untrained", f"step {chosen[1]}", f"trained ({chosen[2]} steps)")
    for row, title in enumerate(titles):
        axes[row, 0].set_ylabel(title, fontsize=9)
    return save(figure, "before_after.png")


def masks(_: Path) -> Path:
    """Every kind of mask: four samples, then how often each position is hidden, without and with roll."""
    figure, axes = pyplot.subplots(len(MASKS), 6, figsize=(9, 1.55 * len(MASKS)), layout="constrained")
    keys = sample_keys(0, 0, torch.arange(4000))
    for row, (name, mask) in enumerate(MASKS.items()):
        drawn = mask(GRID, HIDDEN, keys)
        for column in range(4):
            axes[row, column].imshow(drawn[column].view(GRID), cmap=HIDDEN_COLOR)
        for column, hidden in ((4, drawn), (5, roll(GRID, drawn, keys))):
            axes[row, column].imshow(hidden.double().mean(0).view(GRID), cmap="viridis", vmin=0, vmax=1)
        axes[row, 0].set_ylabel(name, fontsize=9)
    for column, title in ((0, "dark: hidden"), (4, "how often hidden"), (5, "the same with roll")):
        axes[0, column].set_title(title, fontsize=9)
    return save(figure, "masks.png")


def sinkhorn(run: Path) -> Path:
    """Assignments of 48 images at one position to prototypes, before balancing and after each iteration."""
    encoder = capi.load(run)
    images = capi.transform(encoder)(sorted((run / "pictures" / "snapshots").glob("photo_*.jpg")))
    with torch.no_grad():
        tokens = torch.nn.functional.normalize(encoder(images, pooled=False).feature_map.flatten(0, 2), dim=-1)
    generator = torch.Generator().manual_seed(0)
    rows = tokens[torch.randperm(len(tokens), generator=generator)[:48]]
    prototypes = torch.randn(32, rows.shape[1], generator=generator)
    logits = rows @ prototypes.T
    assignments = torch.exp((logits - logits.amax(0)) / 0.06)
    stages = [("softmax", torch.softmax(logits / 0.06, 1))]
    for iteration in range(1, 4):
        assignments = assignments / (assignments.sum(0) + 1e-8)
        assignments = assignments / (assignments.sum(1, keepdim=True) + 1e-8)
        stages.append((f"Sinkhorn, iteration {iteration}", assignments))
    figure, axes = pyplot.subplots(
        2, len(stages), figsize=(9, 4.6), layout="constrained", height_ratios=(4, 1), sharex=True
    )
    for column, (title, values) in enumerate(stages):
        axes[0, column].imshow(values, cmap="magma", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes[0, column].set_title(title, fontsize=9)
        axes[1, column].bar(np.arange(values.shape[1]), values.sum(0), color="#30475e")
        axes[1, column].axhline(len(rows) / values.shape[1], color="#d1495b", linewidth=1)
        axes[1, column].set_ylim(0, float(stages[0][1].sum(0).max()))
    axes[0, 0].set_ylabel("patches", fontsize=9)
    axes[1, 0].set_ylabel("use", fontsize=9)
    figure.supxlabel("prototypes (red: even use)", fontsize=9)
    return save(figure, "sinkhorn.png")


def report(run: Path) -> Path:
    """The top of the report."""
    return screenshot((run / "report.html").resolve().as_uri(), "report.png", height=1000)


def explorer(run: Path) -> Path:
    """The explorer after a click on a photo."""
    command = [sys.executable, "-m", "capi", "explore", str(run), "--port", str(PORT)]
    server = subprocess.Popen(command, env=os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"})
    try:
        address = f"http://127.0.0.1:{PORT}"
        for _ in range(120):
            try:
                urllib.request.urlopen(address, timeout=1).close()
                break
            except OSError:
                time.sleep(1)
        return screenshot(address, "explorer.png", height=800, click=(330, 400))
    finally:
        server.terminate()
        server.wait()


def doctor(run: Path) -> Path:
    """What `capi doctor` prints."""
    words = [sys.executable, "-m", "capi", "doctor", run.name]
    place = {"cwd": run.resolve().parent, "env": os.environ | {"COLUMNS": "80"}}
    told = subprocess.run(words, check=False, capture_output=True, text=True, **place)
    lines = [f"$ capi doctor {run.name}", *told.stdout.rstrip().splitlines()]
    figure = pyplot.figure(figsize=(7.4, 0.19 * len(lines) + 0.3), facecolor="#1d2129")
    figure.text(0.02, 0.5, "\n".join(lines), color="#e6e6e6", family="monospace", fontsize=8.5, va="center")
    return save(figure, "doctor.png")


def save(figure: Figure, name: str) -> Path:
    """A figure without ticks, among the pictures of the docs."""
    for axes in figure.axes:
        axes.set_xticks([])
        axes.set_yticks([])
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / name
        figure.savefig(drawn, dpi=110)
        return compress(drawn)


def screenshot(address: str, name: str, *, height: int, click: tuple[int, int] | None = None) -> Path:
    """What a browser shows, after a click if there is one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, BROWSERS))), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": height})
        page.goto(address)
        page.wait_for_timeout(3000)
        if click:
            page.mouse.click(*click)
            page.wait_for_timeout(4000)
        drawn = Path(folder) / name
        page.screenshot(path=drawn)
        browser.close()
        return compress(drawn)


def compress(drawn: Path) -> Path:
    """256 colors are enough for these pictures, and a third of the bytes."""
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(PICTURES / drawn.name, optimize=True)
    return PICTURES / drawn.name


DRAWN = {drawing.__name__: drawing for drawing in (before_after, masks, sinkhorn, report, explorer, doctor)}

if __name__ == "__main__":
    main()
