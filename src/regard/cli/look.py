"""`regard look` and `regard view`: capture the attention of a model, and show it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..ops.memory_limit import format_size
from ..train.failures import disk_errors
from .attention_output import TAPE
from .device import Device
from .files import check_writable
from .run_view import is_run, read_heads, read_run
from .terminal import print_status, progress

SAMPLE_TEXT = "My lord, the king is come, and with the king my lord the duke; good night, my lord, good night."


def look(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a run or of a Hugging Face model, or the name of a model on the Hugging Face hub: gpt2. A "
            "name that is neither a folder nor in the cache is downloaded.",
            metavar="MODEL",
        ),
    ] = None,
    words: Annotated[
        str | None, typer.Argument(help="Text that the model reads. Default: standard input.", metavar="TEXT")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File with the text that the model reads.", metavar="FILE")] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            help="File with the output that the model must write: translations, or a caption. Default: its own output.",
            metavar="FILE",
        ),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Image that the model reads.", metavar="FILE")] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Look at a small model that is part of regard, instead of MODEL.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that opens without a network.", metavar="PAGE.html")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the capture, for regard view.", metavar="TAPE.safetensors")
    ] = None,
    summarize: Annotated[
        bool,
        typer.Option(
            "--summarize", help="Compute the summary of every layer now, so that the viewer opens long texts faster."
        ),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the viewer. Default: 8765 or, if it is taken, the next free one.", min=0, max=65535),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser, or only print the address.")] = True,
    device: Device = None,
) -> None:
    """Open the viewer on the attention of a model while it reads a text or an image.

    Examples:

        regard look --sample

        regard look gpt2 "The cat sat on the mat because it was tired."

        regard look ./bert-base-uncased --text essay.txt --html essay.html

        regard look runs/deen --text in.de --out look.safetensors && regard view look.safetensors

    With --html or --out the viewer is not started. Only safetensors weights are read, and no code of a model is run.
    """
    from ..tasks.look import tape_of
    from ..tasks.model_folder import SAMPLE, model_folder

    if sample:
        if words is not None:
            raise ValueError(f"--sample is the model, got also {model!r}; leave one out")
        words, name = model, "sample"
        if (words, text, image) == (None, None, None):
            piped = "" if sys.stdin.isatty() else sys.stdin.read()
            words = piped if piped.strip() else SAMPLE_TEXT
    elif model is None:
        raise ValueError("give a model: a folder, a name of the Hugging Face hub such as gpt2, or --sample")
    else:
        name = model
    read = None if image is not None and (words, text) == (None, None) else _text(words, text)
    folder = SAMPLE if sample else model_folder(name, say=print_status)
    check_writable(out, folder, text, target, image, flag="--out", ends=(TAPE,))
    check_writable(html, folder, text, target, image, flag="--html", ends=(".html", ".htm"))
    tape = tape_of(folder, text=read, target=_read(target, "--target"), image=image, device=device)
    if summarize:
        with progress("measuring") as show:
            for n, key in enumerate(tape):
                tape.summary(key)
                show(n + 1, len(tape))
    title = Path(name).name
    if out is not None:
        with disk_errors(out, then="try again"):
            tape.save(out)
        print_status(f"{out}: {len(tape)} layer{'s' * (len(tape) > 1)}; regard view {out}")
    if html is not None:
        with disk_errors(html, then="try again"):
            tape.page(name=title).save(html)
        print_status(f"{html}: {format_size(html.stat().st_size)}; open it in a browser")
    if out is html is None:
        viewer = tape.view(name=title, port=port, open_browser=browser)
        print_status("press Ctrl-C to stop the viewer")
        viewer.wait()


def _text(words: str | None, file: Path | None) -> str | None:
    """Return the text to read: the argument, the file, or standard input."""
    if words is not None and file is not None:
        raise ValueError("a text was given, and --text FILE too; leave one out")
    if file is not None:
        return _read(file, "--text")
    if words is not None:
        return words
    if sys.stdin.isatty():
        raise ValueError('give a text: regard look MODEL "The cat sat on the mat.", --text FILE, or standard input')
    found = sys.stdin.read()
    if not found.strip():
        raise ValueError('standard input is empty; give a text: regard look MODEL "The cat sat on the mat."')
    return found


def view(
    captures: Annotated[
        list[Path],
        typer.Argument(
            help="Capture file, or two to compare side by side; or the folder of a run.", metavar="CAPTURE", exists=True
        ),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write a single HTML file instead of starting the viewer.", metavar="PAGE.html")
    ] = None,
    megabytes: Annotated[
        float | None,
        typer.Option(help="About the largest size of the page: more for finer cells. Default: 4.7.", min=1),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of the page, a name with * for any letters, or numbers: 0,5-8. Default: all.", metavar="LAYERS"
        ),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads of the page, numbers: 0,5-8. Default: all.", metavar="HEADS")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the viewer. Default: 8765 or, if it is taken, the next free one.", min=0, max=65535),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other than this default opens the viewer to other machines.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name under which a browser may open the viewer, NAME:PORT, or NAME for every port; may be repeated. "
            "Always allowed: the address itself, and localhost with the same port.",
            metavar="NAME",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device that computes the maps; cuda computes even long maps exactly at once.")
    ] = None,
    keep_summaries: Annotated[
        bool,
        typer.Option(
            help="Keep summaries that take long to compute in the folder CAPTURE.summaries for the next time."
        ),
    ] = True,
    browser: Annotated[bool, typer.Option(help="Open a browser, or only print the address.")] = True,
) -> None:
    """Show captures as a map that zooms from the whole attention matrix to one pair of tokens, or a run's curves.

    Examples:

        regard view look.safetensors

        regard view runs/deen

        regard view before.safetensors after.safetensors --html difference.html

        regard view long.safetensors --html page.html --layers 0-3 --heads 0,5 --megabytes 10

        regard view long.safetensors --device cuda

    Captures are files written by regard look. Of a run, the page shows the curves of its log, live while it trains.
    Press Ctrl-C to stop the viewer. On a remote machine, forward the port
    first, ssh -N -L 8765:127.0.0.1:8765 MACHINE, and open the printed address on your own.
    """
    from .. import views
    from ..lens import Tape

    if any(is_run(path) for path in captures):
        flags = {"megabytes": megabytes, "layers": layers, "heads": heads, "device": device}
        if given := [flag for flag, value in flags.items() if value is not None]:
            raise ValueError(f"--{given[0]} is for captures, got the folder of a run; remove it")
        if len(captures) > 1:
            raise ValueError(f"regard view shows one run at a time, got {len(captures)} names; name one")
        _view_run(captures[0], html, host=host, port=port, allow_host=allow_host or (), browser=browser)
        return
    if len(captures) > 2:
        raise ValueError(f"the viewer shows one or two captures, got {len(captures)}")
    if html is not None:
        if device is not None:
            raise ValueError("--device is for the viewer, which --html does not start; remove one of the two flags")
        check_writable(html, *captures, flag="--html", ends=(".html", ".htm"))
        tapes = [Tape.load(path) for path in captures]
        page = views.page(
            *tapes,
            name=[path.stem for path in captures],
            megabytes=megabytes or views.MEGABYTES,
            layers=_numbers(layers) or layers or "*",
            heads=None if heads is None else _heads(heads),
        )
        with disk_errors(html, then="try again"):
            page.save(html)
        print_status(f"{html}: {format_size(html.stat().st_size)}")
        return
    if given := [flag for flag, value in (("megabytes", megabytes), ("layers", layers), ("heads", heads)) if value]:
        raise ValueError(f"--{given[0]} decides what a page holds; add --html PAGE.html, or remove it")
    viewer = views.serve(
        captures,
        host=host,
        port=port,
        allow_host=allow_host or (),
        device=device,
        keep_summaries=keep_summaries,
        open_browser=browser,
    )
    print_status("press Ctrl-C to stop the viewer")
    viewer.wait()


def _view_run(
    run: Path, html: Path | None, *, host: str, port: int | None, allow_host: Sequence[str], browser: bool
) -> None:
    """Serve the page of a run, or write it as a file."""
    from ..views.run_page.run_document import run_page
    from ..views.run_page.run_server import serve_run

    if html is not None:
        check_writable(html, run, flag="--html", ends=(".html", ".htm"))
        state = read_run(run)
        page = run_page(state, read_heads(run) if state.heads_version is not None else None)
        with disk_errors(html, then="try again"):
            page.save(html)
        print_status(f"{html}: {format_size(html.stat().st_size)}")
        return
    viewer = serve_run(
        partial(read_run, run),
        partial(read_heads, run),
        host=host,
        port=port,
        allow_host=allow_host,
        open_browser=browser,
    )
    print_status("press Ctrl-C to stop the viewer")
    viewer.wait()


def _numbers(text: str | None) -> list[int] | None:
    """Return the numbers of "0,5-8", None if the text is not such a list."""
    if text is None or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return None
    ends = [part.split("-") for part in text.split(",")]
    return [number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)]


def _heads(text: str) -> list[int]:
    numbers = _numbers(text)
    if numbers is None:
        raise ValueError(f"--heads must be numbers such as 0,5-8, got {text!r}")
    return numbers


def _read(path: Path | None, flag: str) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot read {str(path)!r} ({error.strerror}); {flag} must be the name of a file: save the text in a file "
            "and give its name"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 at byte {error.start}; save it as UTF-8") from None
