"""Architecture: a table between tensors and config fields of Hugging Face and ours, read in both directions."""

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
    """The Hugging Face tensor that holds one of our modules or parameters.

    Ours may be the n-th `part` along its rows, or `transposed`; it may begin after `skip` unused rows, or have a `lead`
    dim of 1 in front.
    """

    name: str
    part: int = 0
    transposed: bool = False
    skip: int = 0
    lead: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelHead:
    """A model class of transformers (by the end of its name) and ours: `kind`, built from a config and class count.

    The classes are the rows of our module `counted`. A model of the kind fits if its attributes equal `wanted`. `ties`
    maps tensors that a file may hold in addition to the tensors they duplicate; our models store them once.
    """

    kind: type[nn.Module]
    build: Callable[[Any, int], nn.Module]
    counted: str | None = None
    wanted: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One `model_type`.

    `fields` maps fields of config.json to fields of our `config`, with a default if theirs may be absent. `given` are
    fields of ours with one value, `fixed` the allowed values of theirs if present, `silent` fields of theirs without
    effect, `alone` fields that only ours has, for training. `read` and `write` do what a table cannot.

    `names` maps our modules and parameters to tensors of the files, with `{n}` for the layer. In a model with a head
    theirs keeps the encoder or decoder under `prefix`, ours under `root`. Tensors under `spare` exist in theirs alone.
    A class name of theirs is `title` plus the name of a head.
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
        """Return our config from the fields of theirs and the names of the tensors in the files."""
        for name, values in {"is_encoder_decoder": (False,), **self.fixed}.items():
            fields.must(name, *values)
        hints = get_type_hints(self.config)
        ours = dict(self.given)
        for theirs, mapped in self.fields.items():
            name, default = mapped if isinstance(mapped, tuple) else (mapped, None)
            value = self._value(fields, theirs, hints[name], default)
            if ours.setdefault(name, value) != value:
                raise fields.error(theirs, f"{ours[name]}, the value of another field for the same size", value)
        ours |= self.read(fields, ours, held)
        fields.close(*self.silent)
        with fields.path_in_errors():
            return self.config(**ours)

    @staticmethod
    def _value(fields: ConfigFields, name: str, hint: Any, default: Any) -> Any:
        """Read a field of theirs with the type of ours."""
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
        """Return the fields of theirs for our config."""
        config = _normalize(config)
        names = {theirs: mapped if isinstance(mapped, str) else mapped[0] for theirs, mapped in self.fields.items()}
        back = {ours: theirs for theirs, ours in reversed(list(ACTIVATIONS.items()))}
        fields = {theirs: getattr(config, name) for theirs, name in names.items()}
        for theirs, name in names.items():
            if name == "activation":
                fields[theirs] = back[fields[theirs]]
        return fields | self.write(config)

    def inexpressible_fields(self, config: Any, held: Collection[str]) -> list[str]:
        """Return the fields of our config that theirs cannot express: those that differ after a round trip."""
        again = _normalize(self.config_of(ConfigFields(self.fields_of(config), Path("config.json")), held))
        names = (f.name for f in dataclasses.fields(config) if f.name not in self.alone)
        ours = _normalize(config)
        return [f"{name}={getattr(ours, name)!r}" for name in names if getattr(ours, name) != getattr(again, name)]

    def locate(self, ours: str, layer: str) -> TensorLocation | None:
        """Return the tensor of theirs for a module or parameter of ours in this layer, None if there is none."""
        location = self.names.get(ours)
        location = TensorLocation(location) if isinstance(location, str) else location
        return None if location is None else replace(location, name=location.name.replace("{n}", layer))


def _normalize(config: Any) -> Any:
    """Return the config with default sizes as numbers, so that equal models have equal configs."""
    return config.with_sizes() if hasattr(config, "with_sizes") else config


def layers(ours: str, theirs: str, parts: Mapping[str, str | TensorLocation]) -> dict[str, str | TensorLocation]:
    """Return the names of one layer as patterns for every layer."""
    locations = {name: TensorLocation(part) if isinstance(part, str) else part for name, part in parts.items()}
    return {f"{ours}.{name}": replace(part, name=f"{theirs}.{part.name}") for name, part in locations.items()}
