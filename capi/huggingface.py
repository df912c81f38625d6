"""CAPI models in the `transformers` library: importing this makes its Auto classes and pipelines know them.

No code is fetched from anywhere: a folder or a repository holds numbers and settings, and the classes are these.
"""

try:
    from transformers import AutoConfig, AutoImageProcessor, AutoModel
except ImportError as missing:
    from capi.errors import CapiError

    raise CapiError("capi.huggingface needs the transformers library: pip install 'capi[transformers]'") from missing

from capi.zoo.huggingface.library import CapiConfig, CapiImageProcessor, CapiModel, CapiOutput

__all__ = ["CapiConfig", "CapiImageProcessor", "CapiModel", "CapiOutput"]

AutoConfig.register(CapiConfig.model_type, CapiConfig, exist_ok=True)
AutoModel.register(CapiConfig, CapiModel, exist_ok=True)
# Under both names, since there is one: the library looks for the second where torchvision is installed.
AutoImageProcessor.register(
    CapiConfig, image_processor_classes={"pil": CapiImageProcessor, "torchvision": CapiImageProcessor}, exist_ok=True
)
