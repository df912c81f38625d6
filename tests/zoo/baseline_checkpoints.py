"""Small random checkpoints in each layout, and what transformers makes of the same weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capi.models.plain_vit import PlainViT
from capi.types import Features
from capi.zoo.baselines.keys import Layout, _places
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.registry import BASELINES, Baseline
from capi.zoo.released import StateDict

SMALL: dict[str, Any] = {"width": 24, "depth": 3, "heads": 3, "patch_size": 4, "grid": 5, "mlp_width": 40}


def small(name: str, **changes: Any) -> Baseline:
    """A baseline of the same kind whose model is tiny."""
    baseline = BASELINES[name]
    used = {} if baseline.architecture.blocks_used is None else {"blocks_used": 2}
    return replace(baseline, architecture=baseline.architecture.changed(**SMALL | used | changes))


def random_model(baseline: Baseline) -> PlainViT:
    """A model whose weights leave nothing at its usual start: norms, biases and layer scales too."""
    model = PlainViT(baseline.architecture, statistics=baseline.statistics)
    randomize(model)
    return model.eval().requires_grad_(False)


def randomize(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(std=0.3 if tensor.ndim > 1 else 0.5)


def to_theirs(ours: StateDict, layout: Layout) -> StateDict:
    """The same tensors in a source's layout, as a file of theirs has them; parts that are not used are zero."""
    shapes = {name: tuple(value.shape) for name, value in ours.items()}
    theirs: StateDict = {}
    for name, place in _places(layout, shapes).items():
        pieces = [ours[each] for each in place.ours if each is not None]
        parts = [torch.zeros_like(pieces[0]) if each is None else ours[each] for each in place.ours]
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        theirs[name] = value.reshape(place.shape).clone()
    return theirs


def original(baseline: Baseline, model: PlainViT) -> StateDict:
    """The state dict as the source's code has it."""
    return to_theirs(model.state_dict(), baseline.layout)


def save(contents: Any, path: Path) -> Path:
    torch.save(contents, path)
    return path


def images(rows: int = 5, columns: int = 5, patch_size: int = 4, count: int = 2) -> Tensor:
    return torch.randn(count, 3, rows * patch_size, columns * patch_size)


def assert_same(features: Features, expected: Features, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(features.feature_map, expected.feature_map, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(features.registers, expected.registers, atol=tolerance, rtol=tolerance)
    assert features.pooled is not None
    assert expected.pooled is not None
    torch.testing.assert_close(features.pooled, expected.pooled, atol=tolerance, rtol=tolerance)


def transformers_model(kind: str, config: str, **options: Any) -> Any:
    """A tiny random model of the transformers library that keeps to the sizes above."""
    import transformers

    sizes = {
        "hidden_size": SMALL["width"],
        "num_hidden_layers": SMALL["depth"],
        "num_attention_heads": SMALL["heads"],
        "intermediate_size": SMALL["mlp_width"],
        "patch_size": SMALL["patch_size"],
        "image_size": SMALL["patch_size"] * SMALL["grid"],
    }
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes | options))
    randomize(model)
    return model.eval()


def read_back(baseline: Baseline, model: Any, folder: Path) -> PlainViT:
    """What `model` of transformers is once it was written and read here."""
    model.save_pretrained(folder)
    return load_baseline(baseline, folder)


def through_the_original_layout(baseline: Baseline, encoder: PlainViT, path: Path, contents: Any = None) -> PlainViT:
    """The same weights written as the source's own code writes them, and read."""
    state = original(baseline, encoder)
    wrapped = state if contents is None else contents(state)
    return load_baseline(replace(baseline, architecture=encoder.architecture), save(wrapped, path), None)
