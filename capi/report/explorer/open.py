"""The explorer of a model by its name: of a run it knows the prototypes, the temperature and the masks too."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capi.report.draw import load_prototypes
from capi.report.explorer import page
from capi.train.build import mask_sampler
from capi.types import VisionEncoder
from capi.zoo.run_folder import RunFolder, run_config


def explore(
    model: str | Path,
    encoder: VisionEncoder,
    images: Sequence[Path],
    *,
    size: int | None = None,
    host: str = page.HOST,
    port: int | None = None,
    open_browser: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until Ctrl-C."""
    page.explore(
        str(model),
        encoder,
        images,
        size=size,
        host=host,
        port=port,
        open_browser=open_browser,
        announce=announce,
        **known_of(Path(model)),
    )


def known_of(model: Path) -> dict[str, Any]:
    """What a run knows and a file of weights does not."""
    if not RunFolder(model).exists:
        return {"prototypes": None}
    config = run_config(RunFolder(model))
    # Only the clustering has prototypes that patches belong to.
    prototypes = load_prototypes(model) if config.target.kind == "clustering" else None
    temperature = config.optimization.student_temperature
    return {"prototypes": prototypes, "temperature": temperature, "masks": mask_sampler(config)}
