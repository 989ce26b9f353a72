"""`regard look` and `view`: what a model attends to, captured and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..train.failures import disk_errors
from .attention_output import TAPE
from .device import Device
from .files import check_writable
from .terminal import print_status, progress


def look(
    folder: Annotated[Path, typer.Argument(help="a run, or the folder of a Hugging Face model", metavar="DIR")],
    out: Annotated[Path, typer.Option(help="the capture to write, a .safetensors file")],
    text: Annotated[Path | None, typer.Option(help="a file with the text to read", metavar="FILE")] = None,
    target: Annotated[
        Path | None,
        typer.Option(help="a file with what it is to write (its own words): translations, a caption", metavar="FILE"),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="an image to see", metavar="FILE")] = None,
    summarize: Annotated[
        bool, typer.Option("--summarize", help="measure every layer now, so that a long text opens at once")
    ] = False,
    device: Device = None,
) -> None:
    """Capture every attention of a model while it reads a text or sees an image.

    Examples:

        regard look runs/deen --text in.de --out look.safetensors && regard view look.safetensors

        regard look ./bert-base-uncased --text essay.txt --summarize --out essay.safetensors

    Give a text or an image. What is captured is shown by regard view.
    """
    from ..tasks.look import tape_of

    check_writable(out, folder, text, target, image, flag="--out", ends=(TAPE,))
    tape = tape_of(folder, text=_read(text, "--text"), target=_read(target, "--target"), image=image, device=device)
    if summarize:
        with progress("measuring") as show:
            for n, key in enumerate(tape):
                tape.summary(key)
                show(n + 1, len(tape))
    with disk_errors(out, then="try again"):
        tape.save(out)
    print_status(f"{out}: {len(tape)} layer{'s' * (len(tape) > 1)}; regard view {out}")


def view(
    captures: Annotated[
        list[Path], typer.Argument(help="a capture, or two to see side by side", metavar="CAPTURE", exists=True)
    ],
    html: Annotated[
        Path | None, typer.Option(help="write one file to open or send, and serve nothing", metavar="PAGE.html")
    ] = None,
    port: Annotated[int, typer.Option(help="the port of the page; 0 takes one that is free", min=0, max=65535)] = 0,
    host: Annotated[
        str, typer.Option(help="the address of the page; another than this machine's own lets others in")
    ] = "127.0.0.1",
    device: Annotated[
        str | None, typer.Option(help="where maps are computed: cuda makes long ones exact at once")
    ] = None,
    browser: Annotated[bool, typer.Option(help="open a browser, or print the address alone")] = True,
) -> None:
    """Show captures as a map that zooms from the whole matrix to one pair of tokens.

    Examples:

        regard view look.safetensors

        regard view before.safetensors after.safetensors --html difference.html

        regard view long.safetensors --device cuda

    A capture is a file that regard look has written. Ctrl-C ends the viewer.
    """
    from .. import views
    from ..lens import Tape

    if len(captures) > 2:
        raise ValueError(f"the viewer shows one capture or two side by side, got {len(captures)}")
    if html is not None:
        if device is not None:
            raise ValueError("--device is where the viewer computes maps, and --html opens none; leave one of them out")
        check_writable(html, *captures, flag="--html", ends=(".html", ".htm"))
        tapes = [Tape.load(path) for path in captures]
        with disk_errors(html, then="try again"):
            views.page(*tapes, name=[path.stem for path in captures]).save(html)
        print_status(f"{html}: {html.stat().st_size / 1e6:.1f} MB")
        return
    viewer = views.serve(captures, host=host, port=port, device=device, open_browser=browser)
    print_status("Ctrl-C ends it")
    viewer.wait()


def _read(path: Path | None, flag: str) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ValueError(
            f"{flag} must be a file with the text in it, and {str(path)!r} cannot be read ({error.strerror}); save the "
            "text in a file and give its name"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
