"""Load a Hugging Face folder into our models, and save one that transformers can load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...atomic_files import atomic_path, save_tensors
from . import tensors
from .architecture import Architecture, ModelHead, TensorLocation
from .decoders import GPT2, HELIUM, LLAMA, MISTRAL, QWEN2, QWEN3
from .encoders import BERT, DISTILBERT, ROBERTA, VIT
from .fields import ConfigFields
from .tensors import WEIGHTS, StoredTensor
from .translators import BART, MARIAN

CONFIG = "config.json"
ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "distilbert": DISTILBERT,
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "helium": HELIUM,
    "vit": VIT,
    "marian": MARIAN,
    "bart": BART,
}
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
# Tensors in files of older versions whose values follow from the config.
DERIVED = re.compile(r"(.*\.)?(position_ids|token_type_ids|attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")


def load(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model of a Hugging Face folder as one of ours, in evaluation mode.

    The model is that of `config.json`; tensors come from `model.safetensors`, or the files in its index. Nothing is
    downloaded, and no code of the folder is run. A pickle, a `model_type` outside `ARCHITECTURES`, a field or tensor
    that is unknown, missing or of another shape raise a ValueError that names it, before any weight is read. So does a
    tensor that the config ties to another one but that holds other numbers. Tokenizers are left to the caller:
    `Tokenizer.from_file` of `tokenizers` reads the `tokenizer.json`.
    """
    folder = Path(folder)
    fields = ConfigFields.of(folder / CONFIG)
    architecture = fields.one_of("model_type", ARCHITECTURES)
    held = _canonical_names(tensors.list_tensors(folder), architecture)
    config = architecture.config_of(fields, held)
    head = _head(fields, architecture)
    depth = sum(getattr(config, name, 0) for name in ("depth", "encoder_layers", "decoder_layers"))
    if depth > len(held):
        raise ValueError(f"{fields.path}: the config has {depth} layers, but the files hold only {len(held)} tensors")
    classes = _classes(head, architecture, held, fields)
    with fields.path_in_errors(), torch.device("meta"):
        model = head.build(config, classes)
    places = _map_tensors(model, architecture)
    _check(places, held, architecture, folder)
    _check_ties({name: of for name, of in head.ties.items() if name not in places}, held, architecture)
    wanted = {held[name]: place for name, place in places.items()}
    for one, x in tensors.read_tensors(list(wanted)):
        for name, part in wanted[one].split(x.to(dtype)).items():
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(part))
    return model.eval()


def save(model: nn.Module, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` into the folder, for transformers or `load` to read.

    A model that no architecture of transformers can express raises with the reasons.
    """
    folder = Path(folder)
    if any(getattr(part, "kept_heads", None) is not None for part in model.modules()):
        raise ValueError(
            "heads were pruned from this model, and config.json of transformers has one number of heads for all "
            "layers; save model.state_dict() or a checkpoint of regard, which load into the model with all heads"
        )
    kind, architecture, head, places = _find_expression(model)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = {name: place.join(state) for name, place in places.items()}
    config = _config(model)
    data = {
        "architectures": [architecture.title + head],
        "model_type": kind,
        **architecture.fields_of(config),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    if (counted := architecture.heads[head].counted) is not None:
        labels = {str(n): f"LABEL_{n}" for n in range(len(state[f"{counted}.weight"]))}
        data |= {"id2label": labels, "label2id": {label: int(n) for n, label in labels.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, CONFIG):
        with atomic_path(folder / name) as temporary:
            if name == WEIGHTS:
                save_tensors(temporary, found, {"format": "pt"})
            else:
                temporary.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf8")


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of theirs and the parameters of ours that it holds, one after the other along its rows."""

    ours: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # one shape per name of `ours`
    location: TensorLocation

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor of theirs."""
        shape = (self.location.skip + sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])
        return (1, *shape) if self.location.lead else shape[::-1] if self.is_transposed else shape

    @property
    def is_transposed(self) -> bool:
        """Whether the tensor of theirs is a transposed matrix."""
        return self.location.transposed and len(self.shapes[0]) == 2

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """Split a tensor of theirs into parameters of ours."""
        x = x[0] if self.location.lead else x.T if self.is_transposed else x
        parts = x[self.location.skip :].split([shape[0] for shape in self.shapes])
        return {
            name: part.clone(memory_format=torch.contiguous_format) for name, part in zip(self.ours, parts, strict=True)
        }

    def join(self, state: Mapping[str, Tensor]) -> Tensor:
        """Join parameters of ours into the tensor of theirs."""
        parts = [state[name] for name in self.ours]
        x = torch.cat([parts[0].new_zeros(self.location.skip, *parts[0].shape[1:]), *parts])
        return (x[None] if self.location.lead else x.T if self.is_transposed else x).contiguous()


def _map_tensors(model: nn.Module, architecture: Architecture) -> dict[str, TensorMapping]:
    """Map the tensors of theirs by name to the parameters of our model that they hold."""
    groups: dict[str, dict[int, tuple[str, TensorLocation]]] = {}
    parameters = dict(model.named_parameters())
    for ours in parameters:
        name = ours if _has_head(model, architecture) else f"{architecture.root}.{ours}"
        if name.startswith("bert.pool.") and getattr(model, "pool", model) is None:
            name = name.removeprefix("bert.")  # theirs stores the pooler of a classifier with the classifier
        number = LAYER.search(name)
        layer = "" if number is None else number.group()
        name = LAYER.sub("{n}", name, count=1)
        stem, _, leaf = name.rpartition(".")
        whole, part = architecture.locate(name, layer), architecture.locate(stem, layer)
        theirs = whole if whole is not None else part and replace(part, name=f"{part.name}.{leaf}")
        if theirs is None:
            raise ValueError(f"it has no tensor for {ours}")
        parts = groups.setdefault(theirs.name, {})
        if theirs.part in parts:
            raise ValueError(f"it has one tensor for both {parts[theirs.part][0]} and {ours}")
        parts[theirs.part] = ours, theirs
    places = {}
    for name, parts in groups.items():
        ordered = tuple(parts[part][0] for part in sorted(parts))
        shapes = tuple(tuple(parameters[ours].shape) for ours in ordered)
        places[name] = TensorMapping(ordered, shapes, parts[min(parts)][1])
    return places


def _check(
    places: Mapping[str, TensorMapping], held: Mapping[str, StoredTensor], architecture: Architecture, folder: Path
) -> None:
    """Raise unless every tensor is present with its shape, and no other one that would change the model."""
    for name, place in places.items():
        if name not in held:
            raise ValueError(f"{folder} holds no tensor {name!r}, which its {CONFIG} requires")
        tensors.check_floating_point(held[name])
        if held[name].shape != place.shape:
            one = held[name]
            raise ValueError(f"{one.file}: {one.name} must have shape {place.shape} by {CONFIG}, got {one.shape}")
    heads = {theirs.name for ours in architecture.names if (theirs := architecture.locate(ours, "{n}"))}
    for name, one in held.items():
        stem = name.rpartition(".")[0]
        known = name in places or name in heads or stem in heads or stem in architecture.spare
        if not known and not DERIVED.fullmatch(name):
            raise ValueError(f"{one.file} holds {one.name!r}, which the model of its {CONFIG} does not have")


def _check_ties(ties: Mapping[str, str], held: Mapping[str, StoredTensor], architecture: Architecture) -> None:
    """Raise if tied tensors of a file differ: transformers would compute with both, our model has only one."""
    for name, of in ties.items():
        if name not in held:
            continue
        one, other = held[name], held[of]
        tensors.check_floating_point(one)
        if one.shape == other.shape:
            x, y = (x for _, x in tensors.read_tensors([one, other]))
            if bool((x == y).all()):
                continue
        hint = f"drop {one.name} from the file if it is stale"
        if "tie_word_embeddings" in architecture.fields:
            hint = f'write "tie_word_embeddings": false in {CONFIG} to read both'
        raise ValueError(
            f"{one.file}: {one.name} must hold what {other.name} does, which {CONFIG} ties it to, got other numbers; "
            f"{hint}"
        )


def _canonical_names(held: Mapping[str, StoredTensor], architecture: Architecture) -> dict[str, StoredTensor]:
    """Rename tensors to the names in a model with a head, and old names of norms to the new ones."""
    bare = not any(name.startswith(f"{architecture.prefix}.") for name in held)
    heads = {theirs.name for ours in architecture.names if (theirs := architecture.locate(ours, "{n}"))}
    found = {}
    for name, one in held.items():
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        if bare and name.rpartition(".")[0] not in heads:
            name = f"{architecture.prefix}.{name}"
        found[name] = one
    return found


def _head(fields: ConfigFields, architecture: Architecture) -> ModelHead:
    """Return the head for the class that the config names."""
    named = fields.any("architectures")
    title = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    head = None if title is None else architecture.heads.get(title.removeprefix(architecture.title))
    if head is None:
        known = [[architecture.title + name] for name in architecture.heads]
        raise fields.error("architectures", " or ".join(map(json.dumps, known)), named)
    return head


def _classes(
    head: ModelHead, architecture: Architecture, held: Mapping[str, StoredTensor], fields: ConfigFields
) -> int:
    """Return the number of classes from the rows of the head's tensor, since configs omit it if it is 2."""
    if head.counted is None:
        return 0
    theirs = architecture.locate(head.counted, "")
    one = held.get(f"{theirs.name}.weight") if theirs is not None else None
    if one is None or not one.shape:
        raise ValueError(f"{fields.path.parent} holds no tensor '{theirs and theirs.name}.weight'")
    labels = fields.any("id2label")
    if labels is not None and (not isinstance(labels, dict) or len(labels) != one.shape[0]):
        raise fields.error("id2label", f"{one.shape[0]} labels, as many as {one.name} has rows", labels)
    return one.shape[0]


def _has_head(model: nn.Module, architecture: Architecture) -> bool:
    return not architecture.root or hasattr(model, architecture.root)


def _config(model: nn.Module) -> Any:
    for part in (model, getattr(model, "bert", None), getattr(model, "vit", None)):
        if (config := getattr(part, "config", None)) is not None:
            return config
    raise _no_counterpart(model)


def _no_counterpart(model: nn.Module) -> ValueError:
    """Return the error for a model whose class no architecture can express."""
    heads = (head for architecture in ARCHITECTURES.values() for head in architecture.heads.values())
    known = sorted({head.kind.__name__ for head in heads})
    return ValueError(
        f"transformers has no counterpart of {type(model).__name__}; pass a model of one of the classes "
        f"{', '.join(known)}"
    )


def _find_expression(model: nn.Module) -> tuple[str, Architecture, str, dict[str, TensorMapping]]:
    """Return an architecture and head that express the whole model; if there is none, raise with the fewest reasons."""
    config, objections = _config(model), []
    for kind, architecture in ARCHITECTURES.items():
        for name, head in architecture.heads.items():
            if not isinstance(config, architecture.config) or type(model) is not head.kind:
                continue
            lost = [f"{what}={x!r}" for what, wish in head.wanted.items() if (x := getattr(model, what)) != wish]
            try:
                places = _map_tensors(model, architecture)
                lost += architecture.inexpressible_fields(config, places)
            except ValueError as error:
                objections.append((1, f"{architecture.title}{name} of transformers cannot hold this model: {error}"))
                continue
            if not lost:
                return kind, architecture, name, places
            objections.append((len(lost), f"{architecture.title}{name} of transformers has no {', '.join(lost)}"))
    if not objections:
        raise _no_counterpart(model)
    raise ValueError(min(objections)[1])
