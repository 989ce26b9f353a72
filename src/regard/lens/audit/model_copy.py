"""Copy a model and the inputs of its first call, so that running the copy changes nothing of the original."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import torch_internals

CACHES = ("past_key_values", "past_key_value", "cache_params", "cache")  # names of arguments that hold a cache


class CannotAudit(Exception):
    """The reason why a model, or its first call, cannot be run again."""


class FirstCall:
    """The inputs of the first call of a model within a block, copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inputs: tuple[Any, Any] | None = None
        self.refused: CannotAudit | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Copy the inputs of the model's first call within the block."""
        hook = self.model.register_forward_pre_hook(self, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def __deepcopy__(self, memo: object) -> FirstCall:
        return self

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if is_compiling() or self.inputs is not None or self.refused is not None:
            return
        try:
            self.inputs = copy_inputs(args, kwargs)
        except CannotAudit as refused:
            self.refused = refused


def copy_inputs(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Copy the arguments of a call; an empty cache is left out, a filled one raises `CannotAudit`."""
    kwargs = dict(kwargs)
    for name in CACHES:
        if kwargs.get(name) is not None:
            if _cached_tokens(kwargs[name]):
                raise CannotAudit(f"its first call had a filled cache, {name}; capture a forward pass without a cache")
            kwargs[name] = None
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return map_tensors(lambda x: x.detach().clone(), args), map_tensors(lambda x: x.detach().clone(), kwargs)


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model: parameters share memory with the original, buffers and attributes do not, hooks are left out."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        else:
            memo[id(parameter)] = parameter
    for module in model.modules():
        memo |= {id(hooks): type(hooks)() for hooks in torch_internals.hook_tables(module)}
        tensors = [x for x in (*vars(module).values(), *module.buffers(recurse=False)) if isinstance(x, Tensor)]
        memo |= {id(x): x.detach().clone() for x in tensors if id(x) not in memo}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # an attribute of any class may refuse
        raise CannotAudit(f"it cannot be copied: {type(error).__name__}: {error}") from error
    for module in copied.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None) is True:
            config.use_cache = False
    return copied


@contextmanager
def same_random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch after the block."""
    devices = sorted({x.device.index or 0 for x in model.parameters() if x.device.type == "cuda"})
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def map_tensors(change: Callable[[Tensor], Any], x: Any) -> Any:
    """Return nested lists, tuples and mappings with their tensors changed; other objects as they are."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple):
        items = [map_tensors(change, y) for y in x]
        return type(x)(*items) if hasattr(type(x), "_fields") else tuple(items)
    if type(x) is list:
        return [map_tensors(change, y) for y in x]
    if type(x) is dict:
        return {name: map_tensors(change, y) for name, y in x.items()}
    return x


def tensors_in(x: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and mappings, in order."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = tuple(x.values())
    return [tensor for y in x for tensor in tensors_in(y)] if isinstance(x, (list, tuple)) else []


def _cached_tokens(cache: Any) -> bool:
    """Whether a cache holds tokens."""
    length = getattr(type(cache), "get_seq_length", None)
    if length is not None:
        return bool(cache.get_seq_length() > 0)
    return bool(tensors_in(cache)) or not isinstance(cache, (tuple, list, dict))
