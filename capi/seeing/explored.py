"""The explorer of a model by its name: of a run it knows the prototypes, the temperature and the masks too."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capi.build import mask_sampler
from capi.evaluation.picturing import load_prototypes
from capi.pretraining import run_config
from capi.seeing import explorer_page
from capi.train.run_folder import RunFolder
from capi.types import VisionEncoder


def explore(
    model: str | Path,
    encoder: VisionEncoder,
    images: Sequence[Path],
    *,
    size: int | None = None,
    host: str = explorer_page.HOST,
    port: int | None = None,
    open_browser: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until Ctrl-C."""
    explorer_page.explore(
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
