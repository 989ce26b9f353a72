"""Checkpoints: folders that are written atomically, and verified against a manifest before use.

A checkpoint holds `model.safetensors`, what the model needs to be built again (`config.json`, `tokenizer.json`),
`training.safetensors` and `training.json`, and `manifest.sha256` over all of them, in the format of `sha256sum -c`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..atomic_files import atomic_path, save_tensors, sync, temporary_path
from ..checks import suggest_name
from .failures import CheckpointError, disk_errors

MANIFEST = "manifest.sha256"
MODEL = "model.safetensors"
BEST = "best"
COMPILED = "_orig_mod."  # prefix of names within a compiled module
LARGEST_HEADER = 10_000_000
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Content = str | Mapping[str, Tensor]


def write(path: Path, files: Mapping[str, Content]) -> None:
    """Write the folder `path` with these files, atomically.

    The files are written under a temporary name, forced to the disk, and renamed; a process that is killed on the way
    leaves nothing that looks like a checkpoint. An existing folder is replaced.
    """
    for name in files:
        if not NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"a file of a checkpoint must have a plain name other than {MANIFEST}, got {name!r}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        shutil.rmtree(temporary, ignore_errors=True)  # a killed process may have had the same id
        try:
            temporary.mkdir()
            for name, content in files.items():
                if isinstance(content, str):
                    (temporary / name).write_text(content, encoding="utf8", newline="\n")
                else:
                    save_tensors(temporary / name, _apart(content))
                sync(temporary / name)
            (temporary / MANIFEST).write_bytes(_manifest(temporary))
            sync(temporary / MANIFEST)
            sync(temporary)
            if path.exists():
                remove(path)
            os.rename(temporary, path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str, *, then: str = "resume") -> None:
    """Write one text file atomically; `then` ends the error message: what to do once the disk has room."""
    write_bytes(path, text.encode("utf8"), then=then)


def write_bytes(path: Path, content: bytes, *, then: str = "resume") -> None:
    """Write one file atomically. A link stays and its target is replaced; a pipe or device is written to."""
    with disk_errors(path, then=then):
        if path.exists() and (not path.is_file() or path.is_relative_to("/dev")):
            path.write_bytes(content)
            return
        with atomic_path(path.resolve()) as temporary:
            temporary.write_bytes(content)


def verify(path: Path) -> None:
    """Raise `CheckpointError` unless every file matches the manifest."""
    try:
        stored, present = (path / MANIFEST).read_bytes(), _manifest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}: {error.filename}") from None
    if stored == present:
        return
    before, now = (
        {line[66:]: line[:64] for line in text.decode("utf8", "replace").splitlines()} for text in (stored, present)
    )
    for name in before.keys() - now.keys():
        raise CheckpointError(f"{path} is corrupted: {MANIFEST} names {name!r}, which is not in the folder")
    for name in now:
        if before.get(name) != now[name]:
            raise CheckpointError(f"{path} is corrupted: checksum mismatch of {name}")
    raise CheckpointError(f"{path} is corrupted: {MANIFEST} was changed")


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if it is intact."""
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return None


def read_text(path: Path, name: str) -> str:
    """Read a text file of a verified checkpoint."""
    try:
        return (path / name).read_text(encoding="utf8")
    except OSError as error:
        raise CheckpointError(f"{path} has no usable {name}: {error.strerror}") from None


def read_tensors(path: Path, name: str = MODEL) -> dict[str, Tensor]:
    """Read the tensors of one file of a checkpoint, to the CPU."""
    file = path / name
    try:
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        if header > LARGEST_HEADER:
            raise CheckpointError(f"{file} has a header of {header} bytes; the limit is {LARGEST_HEADER}")
        return safetensors.torch.load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def load(path: str | Path, model: nn.Module) -> None:
    """Copy the weights of a checkpoint into `model`, which must have the same names and shapes."""
    path = Path(path)
    verify(path)
    put(read_tensors(path), model, source=str(path / MODEL))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights and buffers by name; tied ones once, under their first name."""
    named = {plain(name): x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    first: dict[int, str] = {}
    return {name: x.detach() for name, x in named.items() if first.setdefault(id(x), name) == name}


def plain(name: str) -> str:
    """Return the name of a parameter without the prefix that `torch.compile` adds."""
    return name.replace(COMPILED, "")


def put(values: Mapping[str, Tensor], model: nn.Module, *, source: str) -> None:
    """Copy tensors into a model; raises `CheckpointError` before any copy unless names and shapes agree.

    Heads that were pruned from the saved model are first removed from layers that have all.
    """
    values = {plain(name): x for name, x in values.items()}
    for name, module in model.named_modules():
        if (fit := getattr(module, "fit_heads", None)) is not None:
            fit(values, f"{plain(name)}." if name else "")
    own = tensors(model)
    for name in [*values, *own]:
        if name not in own:
            raise CheckpointError(f"{source} holds {name!r}, which the model lacks; {suggest_name(name, own)}")
        if name not in values:
            raise CheckpointError(
                f"{source} lacks {name!r}, which the model has; was the model built from its config.json?"
            )
        if values[name].shape != own[name].shape:
            raise CheckpointError(
                f"{source} holds {name!r} of shape {tuple(values[name].shape)}, "
                f"the model's is {tuple(own[name].shape)}; build the model from its config.json"
            )
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(values[name])


def path_of(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint of a run."""
    return int(path.name.removeprefix("step-"))


def all_checkpoints(run: str | Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, corrupted ones included."""
    return sorted((p for p in Path(run).glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)), key=step_of)


def usable(run: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest intact checkpoint, None if there are none; each corrupted one is reported to `say`.

    Raises `CheckpointError` if there are checkpoints and all are corrupted.
    """
    corrupted = []
    for path in reversed(all_checkpoints(run)):
        if (problem := damage(path)) is None:
            return path
        corrupted.append(problem)
        say(f"{problem}; falling back to the checkpoint before")
    if corrupted:
        raise CheckpointError(f"{run} has no intact checkpoint: {corrupted[0]}; nothing was changed there")
    return None


def find(run: str | Path) -> Path:
    """Return the best checkpoint of a run, or else the newest intact one; a path to a checkpoint is returned as it is.

    A newer checkpoint that is corrupted triggers a warning.
    """
    run = Path(run)
    if (run / MANIFEST).exists():
        return run
    if (best := (run / BEST).resolve()).is_dir():
        return best
    if (newest := usable(run, say=lambda line: warnings.warn(line, stacklevel=4))) is None:
        raise CheckpointError(f"{run} holds no checkpoint; is it the folder of a run?")
    return newest


def mark_best(run: Path, path: Path | None) -> None:
    """Point the link `best` of a run at one of its checkpoints; None removes the link."""
    with disk_errors(run):
        if path is None:
            (run / BEST).unlink(missing_ok=True)
            return
        link = temporary_path(run / BEST, "linking")
        link.unlink(missing_ok=True)
        link.symlink_to(path.name, target_is_directory=True)
        os.replace(link, run / BEST)
        sync(run)


def prune(run: Path, *, keep: int, upto: int, best: Path | None, whole: set[Path]) -> None:
    """Delete checkpoints up to a step except the `keep` newest and the best, and what killed processes left.

    Corrupted ones do not count. `whole` holds checkpoints known to be intact; the ones verified here are added.
    """
    left = keep
    for path in reversed([path for path in all_checkpoints(run) if step_of(path) <= upto]):
        if left and (path in whole or not damage(path)):
            whole.add(path)
            left -= 1
        elif not left and path != best:
            remove(path)
    for rest in run.glob(".*.regard"):
        if rest.is_dir() and not rest.is_symlink():
            shutil.rmtree(rest, ignore_errors=True)
        else:
            rest.unlink()


def remove(path: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a killed process leaves no partial checkpoint."""
    doomed = temporary_path(path, "removing")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _manifest(path: Path) -> bytes:
    names = sorted(p.name for p in path.iterdir() if p.name != MANIFEST and not p.name.startswith("."))
    return "".join(f"{digest_of(path / name)}  {name}\n" for name in names).encode()


def digest_of(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _apart(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, contiguous and with separate storage: safetensors has no strides or sharing."""
    apart, seen = {}, set()
    for name, x in values.items():
        x = x.detach().cpu().contiguous()
        storage = x.untyped_storage()
        apart[name] = x.clone() if storage.nbytes() != x.nbytes or storage.data_ptr() in seen else x
        seen.add(storage.data_ptr())
    return apart
