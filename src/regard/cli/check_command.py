"""`regard check`: look for bugs in attention code, in a Python file, a module or the folder of a model."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from torch import nn

from ..lens import check as check_attention


def check(
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME or MODULE:NAME, a class, a function or a layer, or the folder of a model.",
            metavar="TARGET",
        ),
    ],
    dim: Annotated[int | None, typer.Option(help="Width of the input vectors. Default: found in the module.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads. Default: found in the module.")] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--not-causal", help="Whether tokens must not see later ones. Default: found by trying."),
    ] = None,
    batch_first: Annotated[
        bool | None,
        typer.Option("--batch-first/--sequence-first", help="Layout of the vectors. Default: as the module says."),
    ] = None,
    true_means: Annotated[
        str | None,
        typer.Option(help="Meaning of True in a mask: attend or hide. Default: by the name.", metavar="MEANING"),
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(help="Names of checks to leave out, separated by commas.", metavar="NAMES")
    ] = None,
) -> None:
    """Run attention code on made-up tokens and report eleven common bugs.

    Examples:

        regard check attention.py:MultiHead --dim 64 --heads 4

        regard check "attention.py:MultiHead(64, heads=4)" --causal

        regard check ./bert-base-uncased

    A file or module is imported, so its code runs. The exit code is 1 if there are findings.
    """
    module = _module_of(target, dim, heads)
    report = check_attention(
        module,
        dim=dim,
        heads=heads,
        causal=causal,
        batch_first=batch_first,
        true_means=true_means,  # type: ignore[arg-type]  # check() refuses other words
        ignore=[name.strip() for name in (ignore or "").split(",") if name.strip()],
    )
    print(report)
    if report.findings:
        raise typer.Exit(1)


def _module_of(target: str, dim: int | None, heads: int | None) -> nn.Module | Callable[..., Any]:
    """Return the module or function that a target names."""
    if Path(target).is_dir():
        return _model_in(Path(target))
    place, _, code = target.partition(":") if not target.partition("(")[0].endswith(".py") else (target, "", "")
    if not code:
        raise ValueError(f"{target!r} names no class or function; write {place or 'FILE.py'}:NAME, or name a folder")
    name, arguments, options = _parse_call(code)
    imported = _import_target(place)
    found = getattr(imported, name, None)
    if found is None:
        kinds = [each for each, value in vars(imported).items() if _is_own_module(value, imported)]
        raise ValueError(f"{place} has no {name!r}; it has {', '.join(kinds) or 'no layers'}")
    if isinstance(found, nn.Module) or (not inspect.isclass(found) and callable(found) and "(" not in code):
        return found
    if not callable(found):
        raise ValueError(f"{name} is {type(found).__name__}; name a class, a function or a layer")
    if "(" not in code:
        options = _constructor_options(found, dim, heads)
    try:
        made = found(*arguments, **options)
    except TypeError as error:
        raise ValueError(
            f'{name} cannot be built: {error}; write "{place}:{name}(64, heads=4)" with its arguments'
        ) from None
    return made


def _parse_call(code: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name and the arguments of NAME or NAME(64, heads=4); arguments are literals."""
    try:
        tree = ast.parse(code, mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, [], {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and all(word.arg for word in tree.keywords):
            options = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
            return tree.func.id, [ast.literal_eval(value) for value in tree.args], options
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"{code!r} is no name and no call with numbers or texts; write NAME or NAME(64, heads=4)")


def _import_target(place: str) -> ModuleType:
    """Import a file, or a module by its dotted name; the current folder can be imported from."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    if not place.endswith(".py"):
        try:
            return import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"cannot import {place}: {error}; name a file, FILE.py:NAME, or a folder") from None
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{place} is not a file")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))  # files beside it can be imported, as when Python runs it
    spec.loader.exec_module(module)
    return module


def _is_own_module(value: Any, module: ModuleType) -> bool:
    is_layer = inspect.isclass(value) and issubclass(value, nn.Module)
    return is_layer and value.__module__ == module.__name__


def _constructor_options(kind: Callable[..., Any], dim: int | None, heads: int | None) -> dict[str, Any]:
    """Return --dim and --heads as arguments of a class, by the names of its first two required parameters."""
    required = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    given = [size for size in (dim, heads) if size is not None]
    swapped = bool(required) and ("head" in required[0] or required[0] == "h")
    return dict(zip(required, reversed(given) if swapped else given, strict=False))


def _model_in(folder: Path) -> nn.Module:
    """Return the model in a folder: a run of a language model or a classifier, or a Hugging Face model."""
    from ..tasks import classification, language, run_folder

    if (folder / "config.json").is_file() and "model_type" in (folder / "config.json").read_text("utf-8"):
        return _hugging_face_model(folder)
    task = run_folder.task_of(run_folder.open_run(folder))
    if task == language.TASK:
        return language.LanguageModel.load(folder, device="cpu").model
    if task == classification.TASK:
        return classification.Classifier.load(folder, device="cpu").model
    raise ValueError(f"{folder} is a run of the task {task!r}; in Python, pass its model to regard.check(model)")


def _hugging_face_model(folder: Path) -> nn.Module:
    """Return a model read by transformers, from safetensors alone; no code of the folder runs."""
    try:
        import transformers
    except ImportError:
        raise ValueError("reading a Hugging Face folder needs transformers; pip install 'regard[hf]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: nn.Module = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    return model
