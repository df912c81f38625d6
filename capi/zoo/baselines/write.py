"""An encoder back in the layout it came in: what loads the source's own file loads this one in its place."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.models.plain_vit import PlainNetwork
from capi.runtime.atomic import atomic_folder, atomic_open, atomic_write
from capi.zoo.baselines.keys import to_theirs
from capi.zoo.baselines.registry import baseline_named
from capi.zoo.baselines.transformers_layout import config_of, layout_for, written_name
from capi.zoo.huggingface.files import CONFIG, WEIGHTS, check_place


def write_original(network: PlainNetwork, out: Path) -> Path:
    """A folder of transformers, or a checkpoint as the authors' code reads it; it appears complete or not at all."""
    from safetensors.torch import save_file

    assert network.origin is not None, "an encoder that was read from a file knows where it is from"
    baseline, of = baseline_named(network.origin.baseline), network.architecture
    state = {name: value.detach().cpu() for name, value in network.state_dict().items()}
    try:
        if network.origin.layout == "original":
            return _write_checkpoint(network, state, out)
        kind = str(baseline.model_type)
        theirs = to_theirs(state, layout_for(of, kind))
        check_place(out, overwrite=True)
        with atomic_folder(out.resolve()) as partial:
            atomic_write(partial / CONFIG, json.dumps(config_of(of, kind), indent=2) + "\n")
            named = {written_name(name, kind): value for name, value in theirs.items()}
            save_file(named, partial / WEIGHTS, metadata={"format": "pt"})
    except CapiError:
        raise
    except Exception as error:
        # A full disk is an OSError, a RuntimeError or a SafetensorError, depending on who writes.
        raise CapiError(f"{out} cannot be written ({getattr(error, 'strerror', None) or error})") from error
    return out


def _write_checkpoint(network: PlainNetwork, state: dict[str, Tensor], out: Path) -> Path:
    assert network.origin is not None
    layout = baseline_named(network.origin.baseline).layout
    theirs = to_theirs(state, layout)
    if layout.periods and network.rotary_periods is not None:
        theirs[layout.periods] = network.rotary_periods.cpu()
    part = layout.part(None)
    if out.is_dir():
        raise CapiError(f"{out} is a folder, but weights of {layout.method} are a file: --out takes its name")
    out.parent.mkdir(parents=True, exist_ok=True)
    contents: Any = {part.prefixes[0] + name: value for name, value in theirs.items()}
    for name in reversed(part.places[0]):
        contents = {name: contents}
    with atomic_open(out) as file:
        torch.save(contents, file)
    return out
