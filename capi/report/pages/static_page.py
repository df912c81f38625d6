"""A page without scripts in the style of a report: one file that needs nothing else."""

from capi.report.pages.data import text
from capi.report.pages.run import asset, digest


def static_page(title: str, body: str) -> str:
    """The whole file; a policy keeps anything from being run or fetched but the pictures that it carries."""
    style = asset("report.css")
    policy = f"default-src 'none'; style-src {digest(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<link rel="icon" href="data:,">\n'
        f"<title>{text(title)} · capi</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{text(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )
