"""The explorer of a model by its name: of a run it knows the prototypes, the temperature and the masks too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from capi.report.draw import in_features, load_prototypes
from capi.report.explorer import page
from capi.runtime.devices import choose_device
from capi.train.build import mask_sampler
from capi.types import Names, VisionEncoder, listed
from capi.zoo.build import recorded_target
from capi.zoo.encoders import open_encoder
from capi.zoo.run_folder import RunFolder, run_config
from capi.zoo.weights import Weights


def explore(
    model: str | Path | VisionEncoder,
    images: Names = (),
    *,
    size: int | None = None,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    host: str = page.HOST,
    port: int | None = None,
    open_browser: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """A page in the browser to look around in what an encoder sees, until Ctrl-C. Needs the extra `explore`.

    `size` is the short side of images, by default that of the encoder's own size.
    """
    encoder = open_encoder(model, weights=weights, device=choose_device(device))
    name = str(model) if isinstance(model, str | Path) else type(model).__name__
    page.serve(
        name,
        encoder,
        [Path(image) for image in listed(images)],
        size=size,
        host=host,
        port=port,
        open_browser=open_browser,
        announce=announce,
        **known_of(Path(name)),
    )


def known_of(model: Path) -> dict[str, Any]:
    """What a run knows and a file of weights does not."""
    folder = RunFolder(model)
    if not folder.exists:
        return {"prototypes": None}
    config = run_config(folder)
    # Only the clustering has prototypes that patches belong to.
    drawable = recorded_target(folder.record(), config).clusters and in_features(config)
    prototypes = load_prototypes(model) if drawable else None
    temperature = config.optimization.student_temperature
    return {"prototypes": prototypes, "temperature": temperature, "masks": mask_sampler(config)}
