"""What is known of one published model, and the rules that many sources share."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from capi.models.plain_architecture import Architecture, count_parameters
from capi.models.plain_vit import PlainViT
from capi.models.weightless import without_weights
from capi.types import IMAGENET, Statistics
from capi.zoo.baselines.keys import Layout, Rule, rule, with_bias

WITH_TRANSFORMERS = (
    "random weights give the same features as the implementation in transformers; not tried with the published file"
)
BY_DOCUMENTATION = "layout from documentation, not verified with real weights"


@dataclass(frozen=True)
class Baseline:
    """One model of a source: what it is, how its file is laid out, whose it is."""

    name: str
    title: str
    """The method, as tables print it."""
    size: str
    """The architecture, as tables print it."""
    data: str
    architecture: Architecture
    layout: Layout
    source: str
    """The repository that publishes it."""
    file: str
    """What the file is called there."""
    licence: str
    verified: str = BY_DOCUMENTATION
    statistics: Statistics = IMAGENET
    model_type: str | None = None
    """What transformers calls the architecture, where it has it."""
    hub_id: str | None = None
    note: str = ""
    """What a reader of its scores should know."""

    @property
    def parameters(self) -> int:
        return count_parameters(self.architecture)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each of our tensors."""
        return shapes_of(self.architecture)


@lru_cache(maxsize=128)
def shapes_of(architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Our names and their shapes for an architecture."""
    with without_weights():
        model = PlainViT(architecture)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


_BLOCK = "blocks.{n}"
MLP_RULES = (
    *with_bias(f"{_BLOCK}.mlp.fc1", f"{_BLOCK}.mlp.expand"),
    *with_bias(f"{_BLOCK}.mlp.fc2", f"{_BLOCK}.mlp.contract"),
)


def timm_block_rules(mlp: tuple[Rule, ...] = MLP_RULES) -> tuple[Rule, ...]:
    """The names of a block that timm's vision transformer has, and most that descend from it."""
    attention = (f"{_BLOCK}.attention.{name}" for name in ("query", "key", "value"))
    return (
        *with_bias(f"{_BLOCK}.norm1", f"{_BLOCK}.attention_norm"),
        *with_bias(f"{_BLOCK}.attn.qkv", *attention),
        *with_bias(f"{_BLOCK}.attn.proj", f"{_BLOCK}.attention.output"),
        *with_bias(f"{_BLOCK}.norm2", f"{_BLOCK}.mlp_norm"),
        *mlp,
    )


def timm_rules(mlp: tuple[Rule, ...] = MLP_RULES) -> tuple[Rule, ...]:
    """The names of timm's vision transformer: DINO, MoCo v3, MSN, iBOT, I-JEPA and MAE have them too."""
    return (
        rule("cls_token", "class_token"),
        rule("pos_embed", "positions"),
        *with_bias("patch_embed.proj", "patch_embedding"),
        *timm_block_rules(mlp),
        *with_bias("norm", "final_norm"),
    )


PATCHES = "patch_embed.proj.weight"
