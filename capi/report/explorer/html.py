"""The parts of the explorer's page that one only looks at, as HTML: text, pictures with captions, scales, legends.

They are the macros of `templates/explorer.html`. Pictures are within the page, every text is escaped, and nothing
refers to anything outside.
"""

import base64
import io
from dataclasses import dataclass
from typing import Any

from PIL import Image

from capi.report.pages.page import environment

parts: Any = environment().get_template("explorer.html").module


@dataclass(frozen=True)
class Figure:
    """A picture with a caption; one of patches has a pixel for each, and is enlarged without blurring."""

    picture: Image.Image
    caption: str = ""
    patches: bool = False

    @property
    def address(self) -> str:
        """The picture itself as an address: exact where pixels are patches, else as a photo."""
        buffer = io.BytesIO()
        if self.patches:
            self.picture.save(buffer, "PNG")
        else:
            self.picture.convert("RGB").save(buffer, "JPEG", quality=90)
        kind = "png" if self.patches else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
