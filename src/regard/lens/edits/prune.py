"""prune: remove heads from a model for good, so that its weights are smaller.

Layers of regard remove their own heads (`Attention.keep_heads`). For models of transformers a `HeadWeights` names the
projections of a family's attention, and its attributes that depend on the number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...nn.attention import Attention, check_prunable
from ...nn.head_pruning import RepeatedHeads, feature_index, keep_input_heads, keep_key_heads, keep_output_heads
from ..layer_names import list_names, shown_name
from .edit import check_layers_exist, is_meant
from .edit_values import Heads, check_head_numbers

RECORD = "pruned_heads"  # in the config of a model of transformers: from layers to the heads that were removed


@dataclass(frozen=True)
class HeadWeights:
    """The projections of an attention of transformers, and its attributes that depend on the number of heads."""

    classes: frozenset[str]
    query: str
    key: str
    value: str
    out: str  # "^" is the module around
    count: tuple[str, ...]  # attributes with the number of query heads
    width: str = "head_dim"
    features: tuple[str, ...] = ()  # attributes with the number of heads times their width
    is_grouped: bool = False


def _names(text: str, suffix: str) -> frozenset[str]:
    return frozenset(f"{name}{suffix}" for name in text.split())


LAYOUTS = (
    HeadWeights(
        _names("Llama Mistral Mixtral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Olmo SmolLM3 Granite", "Attention"),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        count=(),
        is_grouped=True,
    ),
    HeadWeights(
        _names("Bart MBart Marian Pegasus M2M100 Whisper Blenderbot", "Attention"),
        *("q_proj", "k_proj", "v_proj", "out_proj"),
        count=("num_heads",),
    ),
    HeadWeights(
        _names("Bert Roberta XLMRoberta Electra Camembert", "SelfAttention"),
        *("query", "key", "value", "^output.dense"),
        count=("num_attention_heads",),
        width="attention_head_size",
        features=("all_head_size",),
    ),
    HeadWeights(
        frozenset({"DistilBertSelfAttention"}),
        *("q_lin", "k_lin", "v_lin", "out_lin"),
        count=("n_heads",),
        width="attention_head_size",
        features=("dim",),
    ),
    HeadWeights(
        frozenset({"ViTAttention"}),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        count=("num_attention_heads",),
    ),
    HeadWeights(  # transformers 5.0 to 5.17
        frozenset({"ViTSelfAttention"}),
        *("query", "key", "value", "^output.dense"),
        count=("num_attention_heads",),
        width="attention_head_size",
        features=("all_head_size",),
    ),
    HeadWeights(
        frozenset({"GPT2Attention"}),
        *("c_attn", "c_attn", "c_attn", "c_proj"),
        count=("num_heads",),
        features=("split_size",),
    ),
)


def prune(model: nn.Module, heads: Mapping[str, Heads]) -> nn.Module:
    """Remove heads for good, in place; return the model. The weights are smaller.

    The model computes what it computes under `edit(model, {layer: Scale(heads, 0)})`:

    >>> import torch
    >>> from regard.lens import prune
    >>> from regard.nn import Attention
    >>> model = nn.Sequential(Attention(16, heads=4), Attention(16, heads=4))
    >>> prune(model, {"0": [1, 3], "1": 0})[0].query.weight.shape
    torch.Size([8, 16])

    Like `prune_heads` of earlier versions of transformers it changes the model that it is given: for a copy write
    `prune(copy.deepcopy(model), heads)`. Nothing is changed if it raises. The heads that stay are numbered anew from 0.
    Make optimizers afterwards, since the parameters are new ones.

    A model of regard saves and loads as before: its `state_dict`, and its checkpoints, hold which heads are left. A
    model of transformers saves by `save_pretrained`. Where its config can hold the new number of heads, which is so for
    Llama and its kin if all layers have equally many left, `from_pretrained` loads it. Else the config holds the pruned
    heads, and `load_pruned(folder)` loads it. To load a `state_dict` into such a model, first prune the new model by
    the `config.pruned_heads` of the other one.

    Key heads go with the last query head that reads them. If unequal numbers of heads stay in the groups,
    each query head gets a copy of its keys and values when they are computed: the weights shrink, a cache may grow.

    Args:
        model: a model of regard's `Attention` layers, or of transformers: GPT-2, BERT, RoBERTa, ELECTRA, DistilBERT,
            ViT, Llama, Mistral, Qwen, Gemma, BART, Marian, Whisper and others that are built alike.
        heads: from patterns of layer names, as "decoder.*.self_attn", to the numbers of heads to remove.
    """
    if not isinstance(heads, Mapping):
        raise TypeError(f'heads must be a dict from layers to heads, as in {{"0": [1, 3]}}, got {type(heads).__name__}')
    wanted = {
        pattern: check_head_numbers(f"heads of {pattern!r}", [given] if isinstance(given, int) else given)
        for pattern, given in heads.items()
    }
    check_layers_exist(model, wanted)
    layers = dict(_prunable_layers(model))
    removed: dict[str, set[int]] = {}
    for pattern, numbers in wanted.items():
        found = [name for name in layers if is_meant(name, pattern)]
        if not found:
            unknown = next((name for name, _ in model.named_modules() if is_meant(name, pattern)), pattern)
            raise ValueError(_refusal(model, unknown, layers))
        for name in found:
            removed.setdefault(name, set()).update(numbers)
    left = {name: _heads_left(name, layers[name], numbers) for name, numbers in removed.items() if numbers}
    for name in left:
        layers[name].check()
    for name, kept in left.items():
        layers[name].keep(kept)
    _record(model, {name: removed[name] for name in left}, layers)
    return model


def load_pruned(folder: str | Path, **options: Any) -> nn.Module:
    """Return a model of transformers that was pruned and saved by `save_pretrained`.

    `options` are those of `from_pretrained`. A model whose config holds no pruned heads is loaded as it is.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise ValueError(f"config.json in {folder} must name a class of transformers in architectures, got {names}")
    heads = getattr(config, RECORD, None)
    if not heads:
        loaded: nn.Module = kind.from_pretrained(folder, **options)
        return loaded

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        vars(config).pop(RECORD, None)
        prune(self, heads)

    # from_pretrained builds the model by its class, so this one prunes itself before the weights are read.
    pruned: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    model: nn.Module = pruned.from_pretrained(folder, **options)
    model.__class__ = kind
    return model


class _OwnLayer:
    """A layer of regard."""

    def __init__(self, layer: Attention) -> None:
        self.layer, self.heads = layer, layer.heads

    def check(self) -> None:
        check_prunable(self.layer)

    def keep(self, heads: list[int]) -> None:
        self.layer.keep_heads(heads)


class _LayerOfTransformers:
    """An attention of transformers, with the module around it."""

    def __init__(self, name: str, layer: nn.Module, around: nn.Module | None, layout: HeadWeights) -> None:
        self.name, self.layer, self.layout = name, layer, layout
        self.width: int = getattr(layer, layout.width)
        self.query, self.key, self.value = (getattr(layer, x) for x in (layout.query, layout.key, layout.value))
        out = layout.out
        self.out: Any = around.get_submodule(out[1:]) if out[0] == "^" and around is not None else getattr(layer, out)
        self.is_joint = layout.query == layout.key  # one projection to queries, keys and values
        weight: Any = self.out.weight
        self.heads = weight.shape[0 if self.is_joint else 1] // self.width

    @property
    def key_heads(self) -> int:
        """The number of key heads."""
        return self.heads if self.is_joint else self.key.out_features // self.width

    def check(self) -> None:
        for part in (self.query, self.key, self.value, self.out):
            if not self.is_joint and type(part) not in (nn.Linear, RepeatedHeads):
                raise ValueError(
                    f"{shown_name(self.name)} has a {type(part).__name__} for a linear map, from which prune cannot "
                    "take rows; merge adapters or load the model without quantization first"
                )
        if self.is_joint and getattr(self.layer, "is_cross_attention", False):
            raise ValueError(
                f"prune does not know cross-attention of GPT-2, as in {shown_name(self.name)}; switch its heads off "
                "with edit(model, {layer: Scale(heads, 0)})"
            )

    def keep(self, heads: list[int]) -> None:
        layout, width = self.layout, self.width
        layer: Any = self.layer
        if self.is_joint:
            self._keep_joint(heads)
        else:
            keep_output_heads(self.query, heads, width)
            for name in (layout.key, layout.value):
                linear, n = keep_key_heads(getattr(layer, name), self.heads, heads, width)
                setattr(layer, name, linear)
            self.key, self.value = getattr(layer, layout.key), getattr(layer, layout.value)
            if layout.is_grouped:
                layer.num_key_value_groups = len(heads) // n
            keep_input_heads(self.out, heads, width)
        self.heads = len(heads)
        for name in layout.count:
            setattr(layer, name, len(heads))
        for name in layout.features:
            setattr(layer, name, len(heads) * width)

    def _keep_joint(self, heads: list[int]) -> None:
        """Prune the maps of GPT-2, whose weights are transposed: queries, keys and values side by side."""
        joint, out, n = self.query, self.out, self.heads
        every = feature_index([part * n + head for part in range(3) for head in heads], self.width, joint.weight.device)
        each = feature_index(heads, self.width, out.weight.device)
        for module, name, dim, index in (
            (joint, "weight", 1, every),
            (joint, "bias", 0, every),
            (out, "weight", 0, each),
        ):
            before = getattr(module, name)
            value = before.detach().index_select(dim, index)
            setattr(module, name, nn.Parameter(value, requires_grad=before.requires_grad))
        joint.nf, out.nx = len(every), len(each)


_Layer = _OwnLayer | _LayerOfTransformers


def _prunable_layers(model: nn.Module) -> Iterator[tuple[str, _Layer]]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if type(module) is Attention:
            yield name, _OwnLayer(module)
        elif type(module).__module__.startswith("transformers."):
            kind = type(module).__name__
            for layout in LAYOUTS:
                if kind in layout.classes:
                    yield name, _LayerOfTransformers(name, module, modules.get(name.rpartition(".")[0]), layout)


def _heads_left(name: str, layer: _Layer, removed: set[int]) -> list[int]:
    if max(removed) >= layer.heads or min(removed) < 0:
        raise IndexError(f"heads of {shown_name(name)!r} must be from 0 to {layer.heads - 1}, got {sorted(removed)}")
    left = [head for head in range(layer.heads) if head not in removed]
    if not left:
        raise ValueError(
            f"prune would leave {shown_name(name)!r} without heads; keep one, or switch all off with "
            f"edit(model, {{{name!r}: Scale(None, 0)}})"
        )
    return left


def _refusal(model: nn.Module, name: str, known: Mapping[str, _Layer]) -> str:
    kind = type(model.get_submodule(name)).__name__
    there = f"it can prune {list_names(known)}; " if known else ""
    return (
        f"prune does not know where the heads of {shown_name(name)!r}, a {kind}, are in its weights; {there}"
        f"switch its heads off with edit(model, {{{name!r}: Scale(heads, 0)}})"
    )


def _record(model: nn.Module, removed: Mapping[str, set[int]], layers: Mapping[str, _Layer]) -> None:
    """Write into the configs of models of transformers which heads they lack, or how many their layers have left."""
    roots = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "save_pretrained") and hasattr(module, "config")
    }
    for root, module in roots.items():
        start = f"{root}." if root else ""
        if any(start.startswith(f"{other}." if other else "") for other in roots if other != root):
            continue  # a part of another one
        own = {name.removeprefix(start): layer for name, layer in layers.items() if name.startswith(start)}
        record = {name: set(numbers) for name, numbers in (getattr(module.config, RECORD, None) or {}).items()}
        for name, numbers in removed.items():
            if (local := name.removeprefix(start)) in own:
                before = record.get(local, set())
                old = [n for n in range(own[local].heads + len(numbers) + len(before)) if n not in before]
                record[local] = before | {old[n] for n in numbers}
        if _set_config(module.config, own):
            vars(module.config).pop(RECORD, None)
        elif record:
            setattr(module.config, RECORD, {name: sorted(numbers) for name, numbers in record.items()})


def _set_config(config: Any, layers: Mapping[str, _Layer]) -> bool:
    """Set the numbers of heads in a config if it can hold them: one number for all layers, and the width of a head."""
    found = [layer for layer in layers.values() if isinstance(layer, _LayerOfTransformers)]
    if not found or not all(each.layout.is_grouped for each in found) or not hasattr(config, "num_key_value_heads"):
        return False
    sizes = {(each.heads, each.key_heads, each.width, type(each.key) is nn.Linear) for each in found}
    if len(sizes) > 1:
        return False
    ((heads, key_heads, width, is_plain),) = sizes
    if not is_plain:
        return False
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, key_heads, width
    return True
