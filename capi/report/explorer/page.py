"""The explorer as a page in the browser, on this machine alone: pick an image, click a patch, hide a region.

Only this module knows gradio, and imports it when it is needed. The page fetches nothing from elsewhere; uploads and
pictures lie in a temporary folder that is removed at the end. The page shows what goes wrong with an image.

The explorer of a model by its name: of a run it knows the prototypes, the temperature and the masks too.
"""

import asyncio
import os
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from capi.errors import CapiError
from capi.method.masking import MaskSampler
from capi.report.draw import Prototypes, in_features, load_prototypes
from capi.report.explorer.layout import ExplorerLayout
from capi.report.explorer.session import Explorer
from capi.report.pages.page import asset
from capi.report.pictures.colormaps import HEAT, css_gradient
from capi.report.pictures.hidden_patches import STUDENT_TEMPERATURE
from capi.report.watch import is_loopback
from capi.runtime.devices import choose_device
from capi.train.build import mask_sampler
from capi.types import Names, VisionEncoder, listed
from capi.zoo.build import recorded_target
from capi.zoo.encoders import open_encoder
from capi.zoo.run_folder import RECORD, RunFolder, run_config
from capi.zoo.weights import WeightsName

Answer = TypeVar("Answer")
HOST = "127.0.0.1"
MAX_UPLOAD = "32mb"
MAX_SESSIONS = 16
USUAL_PORT = 7860


def serve(
    model_name: str,
    encoder: VisionEncoder,
    images: Sequence[Path],
    *,
    prototypes: Prototypes | None,
    size: int | None = None,
    host: str = HOST,
    port: int | None = None,
    open_browser: bool = False,
    announce: Callable[[str], None],
    temperature: float = STUDENT_TEMPERATURE,
    masks: MaskSampler | None = None,
) -> None:
    """Serve the explorer until Ctrl-C. Without images there are six photos of the demo."""
    explorer = Explorer(encoder, images, prototypes=prototypes, size=size, temperature=temperature, masks=masks)
    if not is_loopback(host):
        announce(f"everyone who reaches {host} can use this page: bind to {HOST} to keep it to yourself")
    with serving(explorer, model_name, host=host, port=port, open_browser=open_browser) as address:
        announce(f"exploring {model_name} at {address} (Ctrl-C ends it)")
        _wait()
    announce("the explorer has ended")


def _wait() -> None:
    """Until Ctrl-C, or until a signal ends the process: the temporary folder is removed in both cases."""
    ended = threading.Event()
    # Only the first thread of a process hears of signals.
    hears = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set()) if hears else None
    try:
        # In small steps, since not every system wakes a thread that waits.
        while not ended.wait(1.0):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        if hears:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def serving(
    explorer: Explorer,
    model_name: str,
    *,
    host: str = HOST,
    port: int | None = None,
    open_browser: bool = False,
) -> Iterator[str]:
    """The page as long as the block lasts; gives its address."""
    chosen = free_port(host) if port is None else _tried(host, port)
    with _own_settings():
        page = build_page(explorer, model_name)
        try:
            address = _in_loop(lambda: _launched(page, host, chosen, open_browser))
            threading.Thread(target=explorer.collect, daemon=True).start()
            yield address
        finally:
            page.close(verbose=False)


def build_page(explorer: Explorer, model_name: str) -> Any:
    """The gradio page, not yet served."""
    gradio = _gradio()
    return _in_loop(lambda: ExplorerLayout(gradio, explorer, model_name)).page


def free_port(host: str = HOST) -> int:
    """The usual port of such pages, or any that is free."""
    try:
        return _tried(host, USUAL_PORT)
    except CapiError:
        return _tried(host, 0)


def _tried(host: str, port: int) -> int:
    """The port if it can be used, which gradio would not tell from other errors; for 0 one that is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        # As the server does it: what a page before this one has just left can be used again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CapiError(f"no page can be served at {host}, port {port} ({reason}): choose another") from error
        chosen: int = listener.getsockname()[1]
        return chosen


def _launched(page: Any, host: str, port: int, open_browser: bool) -> str:
    page.queue(api_open=False).launch(
        server_name=host,
        server_port=port,
        inbrowser=open_browser,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        show_error=False,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        allowed_paths=[],
        max_file_size=MAX_UPLOAD,
        state_session_capacity=MAX_SESSIONS,
        # No pages that describe the interface.
        app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None, "middleware": _guards(host)},
        theme=_theme(),
        css=f"{asset('colors.css')}:root {{ --heat: {css_gradient(HEAT)}; }}\n{asset('explorer.css')}",
    )
    address: str = page.local_url
    return address


def _guards(host: str) -> list[Any]:
    """Refuse foreign host names where only this machine is served: a page from elsewhere may have asked."""
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # The library cuts names at the first colon, which an address of IPv6 does not survive.
    if not is_loopback(host) or ":" in host:
        return []
    return [Middleware(TrustedHostMiddleware, allowed_hosts=[*{HOST, "localhost", host}], www_redirect=False)]


@contextmanager
def _own_settings() -> Iterator[None]:
    """A temporary folder for uploads and pictures, nothing that calls home, and no paths that others allowed."""
    with tempfile.TemporaryDirectory(prefix="capi-explore-", ignore_cleanup_errors=True) as folder:
        wanted = {
            "GRADIO_TEMP_DIR": folder,
            "GRADIO_ANALYTICS_ENABLED": "False",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "GRADIO_ALLOWED_PATHS": "",
            "GRADIO_SHARE": "False",
            "GRADIO_RUN_HISTORY": "False",
        }
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _gradio() -> Any:
    # Before gradio is imported, which looks at it.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        with warnings.catch_warnings():
            # What gradio's own libraries say about each other is nothing that a user could change.
            warnings.simplefilter("ignore")
            import gradio
    except ImportError as error:
        raise CapiError("the explorer needs gradio: pip install 'capi[explore]'") from error
    return gradio


def _theme() -> Any:
    gradio = _gradio()
    return gradio.themes.Default(
        primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )


def _in_loop(action: Callable[[], Answer]) -> Answer:
    """Do something within an event loop: where none runs, gradio opens one for each of its locks and closes none."""

    async def done() -> Answer:
        return action()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(done())
    return action()


def explore(
    model: str | Path | VisionEncoder,
    images: Names = (),
    *,
    size: int | None = None,
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    host: str = HOST,
    port: int | None = None,
    open_browser: bool = False,
    prototypes: str | Path | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """A page in the browser to look around in what an encoder sees, until Ctrl-C. Needs the extra `explore`.

    `size` is the short side of images, by default that of the encoder's own size. `prototypes` is a file of them, as
    `push` writes it, for an encoder that is no run.
    """
    encoder = open_encoder(model, weights=weights, device=choose_device(device))
    name = str(model) if isinstance(model, str | Path) else type(model).__name__
    details = run_parts(Path(name))
    if prototypes is not None:
        details["prototypes"] = Prototypes(**load_file(prototypes))
    serve(
        name,
        encoder,
        [Path(image) for image in listed(images)],
        size=size,
        host=host,
        port=port,
        open_browser=open_browser,
        announce=announce,
        **details,
    )


def run_parts(model: Path) -> dict[str, Any]:
    """What a run knows and a file of weights does not."""
    folder = RunFolder(model)
    # What `capi push` writes has a config, and is no run.
    if not folder.exists or not (model / RECORD).is_file():
        return {"prototypes": None}
    config = run_config(folder)
    temperature = config.optimization.student_temperature
    return {"prototypes": prototypes_of(model), "temperature": temperature, "masks": mask_sampler(config)}


def prototypes_of(run: Path) -> Prototypes | None:
    """What the patches of a run belong to, where its target is a clustering of the features; no code is imported."""
    folder = RunFolder(run)
    config = run_config(folder)
    drawable = recorded_target(folder.record(), config).clusters and in_features(config)
    return load_prototypes(run) if drawable else None
