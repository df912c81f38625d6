"""Count the imports between rooms, and draw them: scripts/layers.py [--svg FILE] [--list]

A room is a package or a module at the top of capi/. An edge is a pair of rooms of which one imports the other, anywhere
in a file: also within functions and for type checkers alone.
"""

import argparse
import ast
import tomllib
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
ROW, BOX, LEFT, TOP, WIDTH = 46, 150, 16, 12, 520


def edges() -> Counter[tuple[str, str]]:
    """How many import statements lead from one room to another."""
    counts: Counter[tuple[str, str]] = Counter()
    for path in sorted((ROOT / "capi").rglob("*.py")):
        room = path.relative_to(ROOT / "capi").parts[0].removesuffix(".py")
        if room in {"__init__", "__main__"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module == "capi":
                names = [f"capi.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            targets = {name.split(".")[1] for name in names if name.startswith("capi.")}
            counts.update((room, target) for target in targets - {room})
    return counts


def layers() -> list[list[str]]:
    """The rooms from top to bottom, neighbours on one line, as the contract in pyproject.toml has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    lines = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    return [[room.strip().removeprefix("capi.") for room in line.split("|")] for line in lines]


def draw(counts: Counter[tuple[str, str]]) -> str:
    """An arc from each room to those it imports, as wide as the imports are many."""
    rooms = [room for line in layers() for room in line]
    place = {room: TOP + ROW * number + ROW // 2 for number, room in enumerate(rooms)}
    height = 2 * TOP + ROW * len(rooms)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    right = LEFT + BOX
    for (room, target), count in sorted(counts.items()):
        if room not in place or target not in place:
            continue
        start, end = place[room], place[target]
        reach = right + 26 * abs(end - start) / ROW
        lines.append(
            f'<path d="M{right} {start} C{reach:.0f} {start} {reach:.0f} {end} {right} {end}" fill="none" '
            f'stroke="{"#4477aa" if end > start else "#cc3311"}" stroke-opacity="0.45" '
            f'stroke-width="{0.6 + count**0.5 / 2:.2f}"><title>{room} imports {target}: {count}</title></path>'
        )
    for room in rooms:
        package = ROOT / "capi" / room
        modules = len(list(package.rglob("*.py"))) if package.is_dir() else 1
        words = f"{modules} modules" if modules > 1 else "1 module"
        lines.append(
            f'<rect x="{LEFT}" y="{place[room] - 17}" width="{BOX}" height="34" rx="6" fill="#eef2f7" '
            'stroke="#4477aa"/>'
            f'<text x="{LEFT + 10}" y="{place[room] + 5}" font-size="14" fill="#222222">{escape(room)}</text>'
            f'<text x="{right - 8}" y="{place[room] + 4}" font-size="10" text-anchor="end" '
            f'fill="#666666">{words}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Print the counts, and write the picture where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="file for the picture")
    parser.add_argument("--list", action="store_true", help="every edge with its number of imports")
    chosen = parser.parse_args()
    counts = edges()
    if chosen.list:
        for (room, target), count in sorted(counts.items()):
            print(f"{room} -> {target} ({count})")
    if chosen.svg is not None:
        chosen.svg.write_text(draw(counts), encoding="utf-8")
    rooms = {room for pair in counts for room in pair}
    print(f"{len(rooms)} rooms, {len(counts)} edges between them")


if __name__ == "__main__":
    main()
