"""Results that show themselves: a few lines in a terminal, a list in a notebook."""

import shutil
import textwrap
from html import escape


class Summary:
    """What a class gives with `summary`: a title, and what is worth knowing by name. Dataclasses need `repr=False`."""

    def summary(self) -> tuple[str, dict[str, str]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        title, rows = self.summary()
        width = min(shutil.get_terminal_size().columns, 120)
        column = max(map(len, rows), default=0) + 4
        lines = [
            textwrap.fill(value, width, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column)
            for name, value in rows.items()
        ]
        return "\n".join([title, *lines])

    def _repr_html_(self) -> str:
        title, rows = self.summary()
        body = "".join(f"<li><b>{escape(name)}</b>: {escape(value)}</li>" for name, value in rows.items())
        return f"<div><b>{escape(title)}</b><ul>{body}</ul></div>"
