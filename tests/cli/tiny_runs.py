"""A run that is trained in a second, with the config file that it can be resumed with."""

from pathlib import Path
from typing import Any

import yaml

import capi
from capi.config.files import parse_config

TREE: dict[str, Any] = {
    "data": {"image_size": 32, "workers": 0},
    "model": {"width": 32, "depth": 1, "heads": 2, "patch_size": 4, "registers": 4},
    "clustering": {"prototypes": 8},
    "masking": {"predict": 5},
    "optimization": {"batch_size": 4, "steps": 2},
    "run": {"loggers": [], "report": False, "snapshots": 1, "log_steps": 1},
}


def train(out: Path, data: Path, config: Path, **sections: Any) -> Path:
    """Train `out`; `config` gets the YAML that it was started with."""
    tree = TREE | sections
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(tree))
    return capi.pretrain(parse_config(tree), data=data, out=out, device="cpu").path
