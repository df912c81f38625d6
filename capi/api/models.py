"""Models: loaded, exported, published."""

from collections.abc import Sequence
from pathlib import Path

from capi.api import push as pushing
from capi.api.push import Pushed
from capi.models.features import CapiEncoder
from capi.models.plain_vit import PlainViT
from capi.zoo import export as exporting
from capi.zoo.baselines.weights import is_baseline, open_baseline
from capi.zoo.encoders import load_weights
from capi.zoo.export import ExportFormat, ExportOptions
from capi.zoo.onnx.trace import Precision
from capi.zoo.weights import Weights


def load(model: str | Path, *, weights: Weights = "teacher") -> CapiEncoder | PlainViT:
    """The frozen encoder of a run folder, of what `capi export` writes (but ONNX), of a checkpoint in the released
    layout, of a published model by its name (`capi models` lists them), or of a Hub id (`owner/name`); or of another
    method, as `baseline:NAME`.

    Of a run `weights` chooses the teacher (the moving average) or the student; files hold one of them. Calling the
    encoder on normalised images gives `Features(pooled, registers, feature_map)`; with `pooled=False` the pooled
    vector is neither computed nor given. A key that is missing, unknown or misshapen is an error that names it; of the
    released layout all keys of the head may be missing, since features need none of them.
    """
    return open_baseline(str(model)) if is_baseline(str(model)) else load_weights(model, weights)


def export(
    model: str | Path,
    out: str | Path,
    *,
    format: ExportFormat = "safetensors",
    weights: Weights = "teacher",
    image_size: int | None = None,
    precision: Precision = "float32",
    opset: int | None = None,
    pooled: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write the encoder of anything that `load` takes: as safetensors, in the released layout, for the transformers
    library (with `image_size`), or as ONNX (with `precision`, `opset` and `pooled`). Says where it is.
    """
    options = ExportOptions(image_size=image_size, precision=precision, opset=opset, pooled=pooled)
    done = exporting.export(model, Path(out), format=format, weights=weights, options=options, overwrite=overwrite)
    return done.path


def push(
    run: str | Path,
    name: str,
    *,
    licence: str | None = None,
    data_description: str = "",
    results: Sequence[str | Path] = (),
    photos: bool = False,
    private: bool = False,
    token: str | None = None,
    dry_run: bool = False,
    out: str | Path | None = None,
    weights: Weights = "teacher",
    watts: float | None = None,
    carbon: float | None = None,
    overwrite: bool = False,
) -> Pushed:
    """Share a run on the Hugging Face Hub as `owner/name`: weights, config and a model card.

    `dry_run` writes the folder and sends nothing. `results` are folders of `evaluate`, beside those within the run.
    """
    return pushing.push(
        Path(run),
        name,
        licence=licence,
        private=private,
        token=token,
        dry_run=dry_run,
        out=None if out is None else Path(out),
        weights=weights,
        data_description=data_description,
        results=[Path(folder) for folder in results],
        photos=photos,
        watts=watts,
        carbon=carbon,
        overwrite=overwrite,
    )
