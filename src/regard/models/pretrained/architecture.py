"""Architecture: which tensors and config fields of Hugging Face are which of ours, a table read in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from ..named_choices import Activation
from .fields import ConfigFields

ACTIVATIONS: Mapping[str, Any] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class TensorLocation:
    """Where one of our modules is among their tensors.

    It may be the n-th `part` along the rows of one, a `transposed` matrix, behind `skip` rows that mean nothing, or
    have a `lead` dim of 1 in front.
    """

    name: str
    part: int = 0
    transposed: bool = False
    skip: int = 0
    lead: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelHead:
    """A model of theirs by the end of its class name: ours of a kind, built from a config and a number of classes.

    The classes are the rows of our module `counted`. A model of the kind fits if its attributes are as `wanted`.
    `ties` are tensors that a file may hold besides, each by the one it repeats: ours keeps the numbers of both once.
    """

    kind: type[nn.Module]
    build: Callable[[Any, int], nn.Module]
    counted: str | None = None
    wanted: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One `model_type`.

    `fields` says which field of theirs is which of `config`, with a default where theirs may be absent; `given` are
    those of ours that never vary, `fixed` the values theirs must have where they are there, `silent` what changes
    nothing, `alone` what only ours has, for training; `read` and `write` do what a table cannot.

    `names` says where the files keep a module or parameter of ours, `{n}` being the layer; a model with a head keeps
    the rest under `prefix`, ours under `root`; tensors under `spare` are theirs alone. Their classes are `title` and
    then a head.
    """

    title: str
    config: type
    prefix: str
    root: str
    fields: Mapping[str, str | tuple[str, Any]]
    names: Mapping[str, str | TensorLocation]
    heads: Mapping[str, ModelHead]
    given: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    read: Callable[[ConfigFields, dict[str, Any], Collection[str]], dict[str, Any]] = lambda fields, ours, held: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}

    def config_of(self, fields: ConfigFields, held: Collection[str]) -> Any:
        """Our config, from the fields of theirs and the names of the tensors there are."""
        for name, values in {"is_encoder_decoder": (False,), **self.fixed}.items():
            fields.must(name, *values)
        hints = get_type_hints(self.config)
        ours = dict(self.given)
        for theirs, mapped in self.fields.items():
            name, default = mapped if isinstance(mapped, tuple) else (mapped, None)
            value = self._value(fields, theirs, hints[name], default)
            if ours.setdefault(name, value) != value:
                raise fields.error(theirs, f"{ours[name]}, as another field has it", value)
        ours |= self.read(fields, ours, held)
        fields.close(*self.silent)
        with fields.named():
            return self.config(**ours)

    @staticmethod
    def _value(fields: ConfigFields, name: str, hint: Any, default: Any) -> Any:
        """A field of theirs, of the kind that ours is."""
        if hint is int:
            return fields.count(name, default=default, least=0)
        if hint is float:
            return fields.number(name, default=default)
        if hint is bool:
            return fields.flag(name, default=bool(default))
        if hint == Activation:
            return fields.one_of(name, ACTIVATIONS, default=default)
        return fields.maybe_count(name, least=0)

    def fields_of(self, config: Any) -> dict[str, Any]:
        """The fields of theirs, from our config."""
        config = _spelled_out(config)
        names = {theirs: mapped if isinstance(mapped, str) else mapped[0] for theirs, mapped in self.fields.items()}
        back = {ours: theirs for theirs, ours in reversed(list(ACTIVATIONS.items()))}
        found = {theirs: getattr(config, name) for theirs, name in names.items()}
        for theirs, name in names.items():
            if name == "activation":
                found[theirs] = back[found[theirs]]
        return found | self.write(config)

    def lost(self, config: Any, held: Collection[str]) -> list[str]:
        """What of our config theirs cannot say: the fields that do not come back from `fields_of`."""
        again = _spelled_out(self.config_of(ConfigFields(self.fields_of(config), Path("config.json")), held))
        names = (f.name for f in dataclasses.fields(config) if f.name not in self.alone)
        ours = _spelled_out(config)
        return [f"{name}={getattr(ours, name)!r}" for name in names if getattr(ours, name) != getattr(again, name)]

    def locate(self, ours: str, layer: str) -> TensorLocation | None:
        """Where a module or parameter of ours is, of this layer if its name has `{n}`; None if nowhere."""
        found = self.names.get(ours)
        found = TensorLocation(found) if isinstance(found, str) else found
        return None if found is None else replace(found, name=found.name.replace("{n}", layer))


def _spelled_out(config: Any) -> Any:
    """A config whose sizes are all numbers, so that two ways to say the same compare equal."""
    return config.spelled_out() if hasattr(config, "spelled_out") else config


def layers(ours: str, theirs: str, parts: Mapping[str, str | TensorLocation]) -> dict[str, str | TensorLocation]:
    """The names of one layer, as those of every layer."""
    found = {name: TensorLocation(part) if isinstance(part, str) else part for name, part in parts.items()}
    return {f"{ours}.{name}": replace(part, name=f"{theirs}.{part.name}") for name, part in found.items()}
