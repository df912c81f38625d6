"""Draw the pictures of README and docs from a run of the demo (`make pictures`).

    python scripts/pictures.py demo_run

Pictures of pages are screenshots of a real browser (Chromium, through playwright).
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import capi
from capi.data.sources import demo_photos
from capi.method.masking import MASKS, PatchGrid, roll
from capi.report.draw import load_prototypes
from capi.report.explorer.content import Content
from capi.report.explorer.session import Explorer
from capi.report.pictures.hidden_patches import hidden_picture
from capi.report.snapshots import photo_path, picture_path, snapshot_steps
from capi.runtime.randomness import sample_keys

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
# The paper's grid at 224 px and patch 16, and what its recipe hides.
GRID, HIDDEN = PatchGrid(14, 14), int(14 * 14 * 0.65)
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
    """Photos, and the first three principal components of their patches: untrained and trained."""
    folder = run / "pictures" / "snapshots"
    steps = snapshot_steps(folder)
    chosen = [steps[0], steps[-1]]
    numbers = [number for number in range(8) if photo_path(folder, number).exists()][:6]
    figure, axes = pyplot.subplots(3, len(numbers), figsize=(1.5 * len(numbers), 4.6), layout="constrained")
    for column, number in enumerate(numbers):
        paths = [photo_path(folder, number), *(picture_path(folder, step, number) for step in chosen)]
        for row, path in enumerate(paths):
            axes[row, column].imshow(np.asarray(Image.open(path).convert("RGB")), interpolation="nearest")
    titles = ("photo", "untrained", f"after {chosen[-1]} steps")
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


def positions(run: Path) -> Path:
    """How often a prototype is used at each position of the grid, by standard and by positionwise assignments."""
    prototypes = load_prototypes(run)
    tokens = normalized_tokens(run, range(640), size=96)
    logits = tokens @ prototypes.weight.T + (0 if prototypes.bias is None else prototypes.bias)
    images, rows, columns, count = logits.shape
    standard = sinkhorn_knopp(logits.reshape(1, -1, count))[0].reshape(images, rows * columns, count)
    positionwise = sinkhorn_knopp(logits.reshape(images, -1, count).transpose(0, 1)).transpose(0, 1)
    # In units of even use: 1 is white.
    uses = [each.mean(0) * count for each in (standard, positionwise)]
    shown = uses[0].std(0).argsort(descending=True)[:8].tolist()
    figure, axes = pyplot.subplots(2, 8, figsize=(9, 2.7), layout="constrained")
    for row, (use, title) in enumerate(zip(uses, ("standard", "positionwise"), strict=True)):
        axes[row, 0].set_ylabel(title, fontsize=9)
        for column, prototype in enumerate(shown):
            axes[row, column].imshow(use[:, prototype].view(rows, columns), cmap="RdBu_r", vmin=0, vmax=2)
            axes[0, column].set_title(f"prototype {prototype}", fontsize=8)
    return save(figure, "positions.png")


def clustering(run: Path) -> Path:
    """One batch: photos, and the prototype that each patch is assigned to; like prototypes have like colors."""
    prototypes, batch, size = load_prototypes(run), range(0, 675, 3), 160
    tokens = normalized_tokens(run, batch, size=size)
    logits = tokens @ prototypes.weight.T + (0 if prototypes.bias is None else prototypes.bias)
    images, rows, columns, count = logits.shape
    assignments = sinkhorn_knopp(logits.reshape(images, -1, count).transpose(0, 1)).transpose(0, 1)
    chosen = assignments.reshape(images, rows, columns, count).argmax(-1)
    # The ranks of a prototype along the first three principal components of all.
    centered = prototypes.weight.detach() - prototypes.weight.detach().mean(0)
    components = centered @ torch.linalg.svd(centered, full_matrices=False)[2][:3].T
    colors = components.argsort(0).argsort(0) / (count - 1)
    figure, axes = pyplot.subplots(2, 6, figsize=(9, 3.2), layout="constrained")
    for column, number in enumerate((2, 167, 183, 193, 202, 213)):
        axes[0, column].imshow(train_photo(batch[number]).resize((size, size)))
        axes[1, column].imshow(colors[chosen[number]])
    for row, title in enumerate(("photo", "prototype")):
        axes[row, 0].set_ylabel(title, fontsize=9)
    return save(figure, "clustering.webp")


def predictions(run: Path) -> Path:
    """Hidden parts of photos, filled with patches of the predicted prototypes, and of the true ones."""
    with tempfile.TemporaryDirectory() as folder:
        explorer = Explorer(capi.load(run), write_photos(Path(folder)), prototypes=load_prototypes(run), size=192)
        explorer.collect()
        content = Content(explorer)
        figure, axes = pyplot.subplots(3, 6, figsize=(9, 4.7), layout="constrained")
        for column, number in enumerate(range(3, 57, 9)):
            view = explorer.view(number)
            hidden = explorer.random_mask(view, "inverse_block", 0.5, seed=number)
            predicted = explorer.predict(view, hidden)
            axes[0, column].imshow(hidden_picture(view.photo, hidden))
            axes[1, column].imshow(content.filled(view, predicted, predicted.predicted))
            axes[2, column].imshow(content.filled(view, predicted, predicted.truth))
            axes[1, column].set_xlabel(f"{100 * predicted.hits(5):.0f} % in the first five", fontsize=8)
    for row, title in enumerate(("seen", "predicted", "truth")):
        axes[row, 0].set_ylabel(title, fontsize=9)
    return save(figure, "predictions.webp")


def gallery(run: Path) -> Path:
    """Prototypes as patches that belong to them, from the most used to the least."""
    folder = run / "pictures" / "prototypes"
    entries = json.loads((folder / "index.json").read_text())["prototypes"][::4]
    figure, axes = pyplot.subplots(len(entries), 1, figsize=(6, 0.95 * len(entries)), layout="constrained")
    for axis, entry in zip(axes, entries, strict=True):
        axis.imshow(Image.open(folder / entry["file"]))
        label = f"{entry['number']}\n{100 * entry['share']:.1f} %"
        axis.set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
    return save(figure, "gallery.webp")


def nearest(run: Path) -> Path:
    """Photos, and those with the most similar features."""
    folder = run / "pictures" / "neighbours"
    sheet = json.loads((folder / "index.json").read_text())
    figure, axes = pyplot.subplots(len(sheet), len(sheet[0]), figsize=(7.5, 5.6), layout="constrained")
    for row, entries in enumerate(sheet):
        for axis, entry in zip(axes[row], entries, strict=True):
            axis.imshow(Image.open(folder / entry["file"]))
            axis.set_xlabel("asked for" if entry["cosine"] is None else f"{entry['cosine']:.2f}", fontsize=8)
    return save(figure, "nearest.webp")


def normalized_tokens(run: Path, numbers: Iterable[int], *, size: int) -> Tensor:
    """Patch features (images rows columns width) of these training photos, of length 1."""
    encoder = capi.load(run)
    with torch.inference_mode():
        images = capi.transform(encoder, size)([train_photo(number) for number in numbers])
        feature_map = encoder(images, pooled=False).feature_map
    return torch.nn.functional.normalize(feature_map, dim=-1)


def train_photo(number: int) -> Image.Image:
    """A photo of the demo's split `train`."""
    return Image.open(io.BytesIO(demo_photos("train").images.read(number))).convert("RGB")


def sinkhorn_knopp(logits: Tensor) -> Tensor:
    """Balanced assignments of each group (groups samples prototypes), as the method page has them."""
    assignments = torch.exp((logits - logits.amax(1, keepdim=True)) / 0.06)
    for _ in range(3):
        assignments = assignments / (assignments.sum(1, keepdim=True) + 1e-8)
        assignments = assignments / (assignments.sum(2, keepdim=True) + 1e-8)
    return assignments


def write_photos(folder: Path) -> list[Path]:
    """The demo's photos of the split `val` as files."""
    photos = demo_photos("val")
    paths = [folder / f"{number:02d}.jpg" for number in range(len(photos.images))]
    for number, path in enumerate(paths):
        path.write_bytes(photos.images.read(number))
    return paths


def demo_curves(run: Path) -> Path:
    """The curves that the run ends with."""
    return compress(run / "pictures" / "curves.png", PICTURES / "demo_curves.png")


def report(run: Path) -> Path:
    """The top of the report."""
    return screenshot((run / "report.html").resolve().as_uri(), "report.png", height=1000)


def explorer(run: Path) -> Path:
    """The explorer after a click on a photo."""
    command = [sys.executable, "-m", "capi", "explore", run.name, "--size", "192", "--port", str(PORT)]
    server = subprocess.Popen(command, cwd=run.resolve().parent)
    try:
        address = f"http://127.0.0.1:{PORT}"
        for _ in range(120):
            try:
                urllib.request.urlopen(address, timeout=1).close()
                break
            except OSError:
                time.sleep(1)
        return screenshot(address, "explorer.webp", height=860, click=(250, 200))
    finally:
        server.terminate()
        server.wait()


def doctor(run: Path) -> Path:
    """What `capi doctor` prints."""
    words = [sys.executable, "-m", "capi", "doctor", run.name]
    place = {"cwd": run.resolve().parent, "env": os.environ | {"COLUMNS": "80"}}
    shown = subprocess.run(words, check=False, capture_output=True, text=True, **place)
    assert shown.stdout, shown.stderr
    lines = [f"$ capi doctor {run.name}", *shown.stdout.rstrip().splitlines()]
    figure = pyplot.figure(figsize=(7.4, 0.19 * len(lines) + 0.3), facecolor="#1d2129")
    figure.text(0.02, 0.5, "\n".join(lines), color="#e6e6e6", family="monospace", fontsize=8.5, va="center")
    return save(figure, "doctor.png")


def save(figure: Figure, name: str) -> Path:
    """A figure without ticks, among the pictures of the docs."""
    for axes in figure.axes:
        axes.set_xticks([])
        axes.set_yticks([])
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / f"{Path(name).stem}.png"
        figure.savefig(drawn, dpi=110)
        return compress(drawn, PICTURES / name)


def screenshot(address: str, name: str, *, height: int, click: tuple[int, int] | None = None) -> Path:
    """What a browser shows; of the explorer what is similar to a place of the photo."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, BROWSERS))), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": height})
        page.goto(address)
        page.wait_for_timeout(3000)
        if click:
            page.locator("#photo img").wait_for(timeout=60_000)
            page.get_by_role("tab", name="Similarity").click()
            page.locator("#photo img").click(position={"x": click[0], "y": click[1]})
            page.get_by_text("Most similar patch").wait_for(timeout=60_000)
            page.wait_for_timeout(5000)
        drawn = Path(folder) / "page.png"
        page.screenshot(path=drawn)
        browser.close()
        return compress(drawn, PICTURES / name)


def compress(drawn: Path, path: Path) -> Path:
    """256 colors are enough for most pictures, and a third of the bytes; photos are packed with losses."""
    picture = Image.open(drawn).convert("RGB")
    if path.suffix == ".webp":
        picture.save(path, quality=80, method=6)
    else:
        picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


DRAWINGS = (
    before_after,
    masks,
    sinkhorn,
    positions,
    clustering,
    predictions,
    gallery,
    nearest,
    demo_curves,
    report,
    explorer,
    doctor,
)
DRAWN = {drawing.__name__: drawing for drawing in DRAWINGS}

if __name__ == "__main__":
    main()
