"""The docs site: `make docs` builds it into build/site, and every warning is an error."""

import json
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode, math_block
from docutils.utils.math.latex2mathml import tex2mathml
from myst_parser.parsers.sphinx_ import MystParser

sys.path.insert(0, str(Path(__file__).parent))

import reference

import capi

project = "capi"
author = project_copyright = "The capi developers"
version = release = capi.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["conf.py", "reference.py"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# Docstrings write code in single backticks.
default_role = "code"
autodoc_type_aliases = {"Image": "Image"}
# Prompts and folder names are no part of a command.
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = "capi"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# Quotes become typographic, dashes stay: `--option` is one.
smartquotes_action = "qe"
# The five pages of the ablations in miniature are pages already.
html_extra_path = ["measurements/ablations"]


html_math_renderer = "mathml"


class NotebookParser(MystParser):  # type: ignore[misc]
    """Notebooks as pages: text as it stands, code as blocks. They are stored without outputs."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(inputstring)["cells"])
        parts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells]
        file = Path(document["source"]).name
        super().parse("\n\n".join([*parts, f"{{download}}`This page as a notebook <{file}>`"]), document)


def visit_math(translator: Any, node: Any) -> None:
    """Formulas as MathML, which browsers draw themselves: the site loads nothing from elsewhere."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, math_block)))
    raise SkipNode


def setup(app: Any) -> None:
    """Write the reference pages from the code before anything is read."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("builder-inited", lambda app: reference.write(Path(app.srcdir) / "reference"))
