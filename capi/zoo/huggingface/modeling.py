"""`CapiModel`: an encoder as the library calls one, from `pixel_values` to a `ModelOutput`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from capi.errors import CapiError
from capi.models.architecture import build_encoder
from capi.models.encoder import INITIAL_TOKEN_STD, Encoder, PatchEmbedding
from capi.models.features import CapiEncoder
from capi.models.heads import INITIAL_HEAD_STD, LinearHead, LinearMap
from capi.models.norms import RMSNorm
from capi.models.positions import INITIAL_TABLE_STD, LearnedPositions
from capi.models.predictor import FusedPredictor, SplitPredictor
from capi.types import Float
from capi.zoo.huggingface.configuration import CapiConfig
from capi.zoo.huggingface.files import ImageSize, checked_image_size


@dataclass
class CapiOutput(ModelOutput):
    """Features under the names of the library."""

    last_hidden_state: Float[Tensor, "b t d"] | None = None
    """Registers, then patches row by row."""
    pooler_output: Float[Tensor, "b e"] | None = None
    """One vector for each image, of the predictor's width."""
    feature_map: Float[Tensor, "b rows columns d"] | None = None
    """The patches once more, where they stand."""
    hidden_states: tuple[Tensor, ...] | None = None
    """Where asked for: what goes into the first block, then what comes out of each, before the final norm."""


class CapiModel(PreTrainedModel):
    """A `CapiEncoder` under the attribute `model`, with the library's ways of loading, saving and sharing."""

    config_class = CapiConfig
    base_model_prefix = "capi"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["Block"]  # noqa: RUF012 - the library's own form
    _supports_sdpa = True

    def __init__(self, config: CapiConfig) -> None:
        super().__init__(config)
        size = checked_image_size(config.image_size, config.patch_size)
        self.model = build_encoder(config.architecture(), config.statistics(), size)
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder: CapiEncoder, *, image_size: ImageSize) -> "CapiModel":
        """A model around this encoder, sharing its weights."""
        with torch.device("meta"):
            made = cls(CapiConfig.from_encoder(encoder, image_size=image_size))
        made.model = encoder
        return made.eval()

    def forward(
        self,
        pixel_values: Float[Tensor, "b c height width"] | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> CapiOutput | tuple[Any, ...]:
        if pixel_values is None:
            raise CapiError("a CAPI model needs pixel_values: images normalised by its image processor")
        if output_attentions or self.config.output_attentions:
            raise CapiError("a CAPI model gives no attentions: its attention is computed without them")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        with _recorded(self.model.encoder, wanted=bool(output_hidden_states)) as hidden_states:
            features = self.model(pixel_values.to(self.dtype))
        patches = features.feature_map.flatten(1, 2)
        output = CapiOutput(
            last_hidden_state=torch.cat([features.registers, patches], dim=1),
            pooler_output=features.pooled,
            feature_map=features.feature_map,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the modules begin themselves; the library asks it of what a file did not hold."""
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, PatchEmbedding):
            _init_patch_embedding(module)
        elif isinstance(module, Encoder):
            nn.init.normal_(module.registers, std=INITIAL_TOKEN_STD)
        elif isinstance(module, SplitPredictor | FusedPredictor):
            nn.init.normal_(module.mask_token, std=INITIAL_TOKEN_STD)
        elif isinstance(module, LearnedPositions):
            nn.init.trunc_normal_(module.table, std=INITIAL_TABLE_STD)
        elif isinstance(module, LinearHead):
            nn.init.trunc_normal_(module.direction, std=INITIAL_HEAD_STD)
            nn.init.ones_(module.length)
        elif isinstance(module, LinearMap):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Linear):
            _init_linear(module)


def _init_patch_embedding(module: PatchEmbedding) -> None:
    # The library marks loaded weights and leaves them alone, but a view of one has no mark.
    if not getattr(module.weight, "_is_hf_initialized", False):
        nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1))
    assert module.bias is not None
    bound = module.weight[0].numel() ** -0.5
    nn.init.uniform_(module.bias, -bound, bound)


def _init_linear(module: nn.Linear) -> None:
    """Only the layers of an MLP head have biases, and begin like the head they lead to."""
    if module.bias is None:
        nn.init.xavier_uniform_(module.weight)
    else:
        nn.init.trunc_normal_(module.weight, std=INITIAL_HEAD_STD)
        nn.init.zeros_(module.bias)


@contextmanager
def _recorded(encoder: Encoder, *, wanted: bool) -> Iterator[list[Tensor]]:
    """The tokens before the first block and after each, filled in while the encoder runs inside."""
    states: list[Tensor] = []
    if not wanted:
        yield states
        return
    handles = [encoder.blocks[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))]
    handles += [block.register_forward_hook(lambda _, __, output: states.append(output)) for block in encoder.blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
