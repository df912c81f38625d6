"""What all sections of a config are made of: strict frozen models, and numbers with limits."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Configs come from others too: what they ask for must be possible. The limits are far above any run that there was.
Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Side = Annotated[int, Field(ge=1, le=2**16)]
"""Pixels."""
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=1024)]
Batch = Annotated[int, Field(ge=1, le=2**24)]
Iterations = Annotated[int, Field(ge=1, le=10_000)]
Workers = Annotated[int, Field(ge=0, le=1024)]
Mebibytes = Annotated[int, Field(ge=0, le=2**24)]
Pictures = Annotated[int, Field(ge=0, le=10_000)]


class Section(BaseModel):
    """What all parts of the config share."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
