"""Several runs in one table: where each stands, its last values, and what rings."""

from collections.abc import Iterator, Sequence

from capi.report.pages.charts import chart_list
from capi.report.pages.data import RunReport, number, text

_VALUES = ("student_loss", "clustering_loss", "target_entropy", "images_per_second")


def overview(runs: Sequence[RunReport], links: Sequence[str]) -> str:
    """A row for each run; the table scrolls by itself where the screen is narrow."""
    columns = list(_columns(runs))
    titles = "".join(f'<th scope="col" class="number">{text(title)}</th>' for _, title in columns)
    rows = "".join(
        _row(run, link, number, [key for key, _ in columns])
        for number, (run, link) in enumerate(zip(runs, links, strict=True))
    )
    return (
        '<div class="box" tabindex="0"><table class="runs"><thead><tr><th scope="col">Run</th>'
        f'<th scope="col">State</th><th scope="col">Alarms</th><th scope="col" class="number">Step</th>{titles}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
        '<p class="soft">Values are the last of each run. A name leads to the report of its run.</p>'
    )


def _columns(runs: Sequence[RunReport]) -> Iterator[tuple[str, str]]:
    """Metrics that any of the runs has: the main ones, then all scores."""
    present = dict.fromkeys(key for run in runs for key in run.columns)
    for chart in sorted(chart_list(present), key=lambda chart: chart.group == "scores"):
        for key, label in chart.metrics.items():
            if chart.group == "scores" or key in _VALUES:
                yield key, f"{chart.title} {label}".strip()


def _row(run: RunReport, link: str, index: int, keys: Sequence[str]) -> str:
    values = "".join(f'<td class="number">{_last(run, key)}</td>' for key in keys)
    titles = ", ".join(finding.rule.title for finding in run.alarms)
    ringing = f"▲ {text(titles)}" if titles else "none"
    step = "none" if run.state.step is None else f"{run.state.step:,}"
    return (
        f'<tr><th scope="row"><svg class="key" viewBox="0 0 24 8" aria-hidden="true">'
        f'<path class="line run-{index % 8}" d="M0 4H24"/></svg><a href="{text(link)}">{text(run.name)}</a></th>'
        f'<td class="nowrap">{run.state.mark}</td><td class="alarms-rung">{ringing}</td>'
        f'<td class="number">{step}</td>{values}</tr>'
    )


def _last(run: RunReport, key: str) -> str:
    column = run.columns.get(key)
    last = column.last if column is not None else None
    if last is not None and "/" in key and 0 <= last <= 1:
        return f"{last:.2%}"
    unit = f" {text(run.loss.unit)}" if key == "student_loss" and run.loss else ""
    return "none" if last is None else number(last) + unit
