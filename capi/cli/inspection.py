"""Commands that show what a run did: doctor, report, watch, explore; and what a machine can do: selftest."""

from pathlib import Path
from typing import Annotated

import typer

from capi import api
from capi.cli.app import Device, TrustOption, app, check_weights, echo, messages
from capi.cli.evaluation import PICTURE_SIZE, Model, WeightsOption
from capi.cli.terminal import Terminal
from capi.cli.usage import between
from capi.errors import CapiError

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]
Host = Annotated[str, typer.Option(help="Address to listen on; other machines reach the page only if you change it.")]
_PORT = "Port to listen on; by default {}, or one that is free."
WatchPort = Annotated[int | None, typer.Option(help=_PORT.format(7431), callback=between(1, 65535))]
ExplorePort = Annotated[int | None, typer.Option(help=_PORT.format(7860), callback=between(1, 65535))]
Watts = Annotated[float | None, typer.Option(help="Power of the device, instead of an assumed one.")]
Carbon = Annotated[float | None, typer.Option(help="kg of CO2 equivalent a kWh; by default 0.48, the world's average.")]


@app.command()
def doctor(run: Run) -> None:
    """Say what is well with a run and what is not, with advice. Exit code 1 where something is wrong."""
    diagnosis = api.doctor(run)
    Terminal(soft_wrap=True).print(api.diagnosis_text(diagnosis))
    raise typer.Exit(1 if diagnosis.has_alarms else 0)


@app.command()
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="File to write; by default report.html in the run.")] = None,
    watts: Watts = None,
    carbon: Carbon = None,
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Write one HTML file about a run: health, scores, curves, pictures, prototypes, cost. It opens offline."""
    written = api.report(run, out, watts=watts, carbon=carbon, device=device, console=messages())
    echo(f"wrote {written}: open it in a browser")


@app.command()
def watch(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, also of such that still train.")],
    host: Host = "127.0.0.1",
    port: WatchPort = None,
    watts: Watts = None,
    carbon: Carbon = None,
) -> None:
    """Serve the reports of runs on this machine while they train; several are compared. Ctrl-C ends it."""
    api.watch(runs, host=host, port=port, watts=watts, carbon=carbon, announce=echo)


@app.command()
def explore(
    model: Model,
    images: Annotated[list[Path] | None, typer.Argument(help="Images or folders; none: photos of the demo.")] = None,
    size: Annotated[
        int | None,
        typer.Option(help=f"Short side in pixels that images are seen at; {PICTURE_SIZE}.", callback=between(1, 2**14)),
    ] = None,
    weights: WeightsOption = "teacher",
    host: Host = "127.0.0.1",
    port: ExplorePort = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Look around in the browser: similar patches, clusters, prototypes, and what is predicted of hidden ones."""
    check_weights(weights, [model])
    api.explore(
        model,
        images or [],
        size=size,
        weights=weights,  # type: ignore[arg-type]
        device=device,
        host=host,
        port=port,
        open_browser=open_browser,
        announce=echo,
    )


@app.command()
def selftest(
    out: Annotated[Path, typer.Option(help="File to write, as JSON.")] = Path("selftest.json"),
    only: Annotated[list[str] | None, typer.Option(help="A check to run alone; may repeat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON too, in place of a paragraph.")] = False,
    device: Device = None,
) -> None:
    """Check that this machine trains as it should: exactness, speed, memory, compiler, resume, all GPUs.

    Exit code 1 where a check fails. It takes ten minutes at most on a GPU, and about one at a CPU's smaller sizes.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise CapiError(f"--out {out} cannot be written: give the name of a file in a folder that is there")
    tested = api.selftest(only=only or [], device=device, console=messages())
    api.atomic_write(out, tested.json())
    echo(tested.json() if as_json else f"{tested.paragraph()}\n\nwrote {out}: paste both into an issue")
    raise typer.Exit(0 if tested.passed else 1)
