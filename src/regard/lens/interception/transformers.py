"""Hugging Face models: seen through the two interfaces by which transformers looks up attention and its masks.

While somebody watches, what `AttentionInterface` finds for a layer, whichever implementation it is, also shows what it
is called with: the model runs what it always runs. What `AttentionMaskInterface` finds notes where the queries of each
mask stand, which a model with a static or a sliding cache knows there and nowhere later.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.terms.masks import Causal, Padding, Window
from ...ops.terms.normalizers import SinkSoftmax
from ...ops.torch_state import is_traced
from ..recording.observed import ObservedAttention
from ..recording.store import check_holds_numbers
from ..terms.interpret import Reader
from .function_mode import Watch, recomputing
from .sdpa import found_again, hear, is_short, tell, tell_no_more

EAGER, CAUSAL = "eager", Causal()
DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # ask for tokens drafted ahead
EMBEDDED = "inputs_embeds"  # a prompt as vectors, of which what is found has no ids
NUMBERS = ("is_causal", "scaling", "sliding_window", "softcap")  # arguments that say what is attended to


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """See the attention of transformers models within the block; nothing to do where there are none."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not any(type(part).__module__.startswith("transformers.") for part in watch.parts):
        yield
        return
    with _LOCK:
        if not _WATCHES:
            _wrap(transformers)
        _WATCHES.append(watch)
        writing = _let_tell_generations(watch.parts)
    try:
        yield
    finally:
        with _LOCK:
            _WATCHES.remove(watch)
            for part in writing:
                mine = isinstance(vars(part).get("generate"), _Generate)
                if mine and not any(id(part) in other.names for other in _WATCHES):
                    del vars(part)["generate"]
            if not _WATCHES:
                _unwrap(transformers)


_LOCK = threading.Lock()
_WATCHES: list[Watch] = []
_ORIGINALS: dict[str, Any] = {}  # what the interfaces held before anybody watched


def _watching(module: nn.Module) -> list[Watch]:
    """Who is to see a call of the module, made in this thread."""
    watches = tuple(_WATCHES)
    return [x for x in watches if id(module) in x.names and not x.here.silent and x.concerns(module)]


def _wrap(transformers: Any) -> None:
    attention, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    _ORIGINALS.update(attention=attention.get_interface, masks=masks.__getitem__)
    attention.get_interface = _seeing(attention.get_interface)
    masks.__getitem__ = _placing(masks.__getitem__)
    tell()


def _unwrap(transformers: Any) -> None:
    tell_no_more()
    transformers.AttentionInterface.get_interface = _ORIGINALS.pop("attention")
    transformers.AttentionMaskInterface.__getitem__ = _ORIGINALS.pop("masks")


def _seeing(find: Callable[..., Any]) -> Callable[..., Any]:
    """A lookup whose functions also hand what they are called with to whoever watches the module."""

    def get_interface(self: Any, attn_implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        function = find(self, attn_implementation, default)

        # Layers give some of these by name, and the names are those of transformers.
        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            q, k, v, mask = query, key, value, attention_mask
            if is_traced():
                for watch in _watching(module):
                    check_holds_numbers(q, k, v)
                    watch.compiled = True
                return function(module, q, k, v, mask, *args, **kwargs)
            watches = _watching(module)
            if not watches:
                return function(module, q, k, v, mask, *args, **kwargs)
            if recomputing():
                return hear(function, module, q, k, v, mask, *args, **kwargs)[0]
            # Held for later is what is small: no mask and no bias of queries by keys.
            waits = mask is None and kwargs.get("position_bias") is None and kwargs.get("s_aux") is None
            for watch in watches:
                waits = waits and watch.recorder.may_wait(watch.names[id(module)], q, k)
                watch.here.silent += 1
            try:
                if waits and is_short(q, k):
                    result, statistic = function(module, q, k, v, mask, *args, **kwargs), None
                else:
                    result, statistic = hear(function, module, q, k, v, mask, *args, **kwargs)
                name = attn_implementation or EAGER
                for watch in watches:
                    recorder, layer = watch.recorder, watch.names[id(module)]
                    if waits:
                        given = {argument: kwargs[argument] for argument in NUMBERS if argument in kwargs}
                        call = partial(_read_later, recorder.reader, name, module, q, k, statistic, given)
                        recorder.see_later(layer, call)
                        continue
                    with torch.no_grad():
                        place = None if mask is None else watch.here.places.get((q.shape[2], k.shape[2]))
                        seen = _read(recorder.reader, name, module, q, k, v, mask, place, statistic, kwargs)
                        watch.see(layer, recorder.own(seen, "normalize"), result[0], _by_heads)
            finally:
                for watch in watches:
                    watch.here.silent -= 1
            return result

        return attend

    return get_interface


def _by_heads(grad: Tensor) -> Tensor:
    """The gradient of an output `b i h e` with the heads where they are everywhere else."""
    return grad.transpose(1, 2)


def _placing(find: Callable[..., Any]) -> Callable[..., Any]:
    """A lookup whose functions also note where the queries of the masks they make stand."""

    def get(self: Any, name: str) -> Callable[..., Any]:
        function = find(self, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            mask = function(*args, **kwargs)
            if mask is not None and "q_offset" in kwargs and not is_traced():
                size = int(kwargs["q_length"]), int(kwargs["kv_length"])
                for watch in tuple(_WATCHES):  # whose model it is for nobody says, but in which thread it runs
                    watch.here.places[size] = int(kwargs["q_offset"]) - int(kwargs.get("kv_offset", 0))
            return mask

        return make

    return get


def _read_later(
    reader: Reader,
    implementation: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    statistic: Tensor | None,
    given: dict[str, Any],
) -> ObservedAttention:
    """A call without a mask that waited; if it was short, its kernel has not been asked for the statistic yet."""
    if implementation == "sdpa" and is_short(q, k):
        statistic = found_again(q, k, is_causal=_is_causal(module, q, given), scale=given.get("scaling"))
    # Whoever keeps no values needs none to tell keys that are repeated.
    return _read(reader, implementation, module, q, k, k, None, None, statistic, given)


def _read(
    reader: Reader,
    implementation: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    place: int | None,
    statistic: Tensor | None,
    given: dict[str, Any],
) -> ObservedAttention:
    """The call in terms, as each implementation means its arguments."""
    causal = _is_causal(module, q, given)
    if "flash" in implementation:
        mask = _flash_mask(mask, causal, given.get("sliding_window"))
    elif mask is None and causal and implementation not in (EAGER, "flex_attention"):
        mask, place = CAUSAL, 0  # PyTorch's own flag counts from the top left
    sink = given.get("s_aux")
    return reader.read(
        q,
        k,
        v,
        mask=mask,
        bias=given.get("position_bias"),
        scale=given.get("scaling"),
        cap=given.get("softcap"),
        normalize=None if sink is None else SinkSoftmax(sink),
        offset=place,
        statistic=statistic,
    )


def _is_causal(module: nn.Module, q: Tensor, given: dict[str, Any]) -> bool:
    flag = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if flag is None else flag) and q.shape[2] > 1


def _flash_mask(keep: Tensor | None, causal: bool, window: int | None) -> Any:
    """Flash attention is handed a padding mask over keys, and says the rest by flags."""
    mask: Any = Causal() if causal else None
    if window is not None:
        mask = Window(window) if mask is None else mask & Window(window)
    if keep is not None:
        padding = Padding(keep.bool())
        mask = padding if mask is None else mask & padding
    return mask


def _let_tell_generations(parts: list[nn.Module]) -> list[nn.Module]:
    """Let `generate` of those that have it say that its passes belong together; return them."""
    kinds = {kind for kind in set(map(type, parts)) if hasattr(kind, "prepare_inputs_for_generation")}
    writing = [part for part in parts if type(part) in kinds] if kinds else []
    for part in writing:
        if "generate" not in vars(part):
            vars(part)["generate"] = _Generate(part)
    return writing


class _Generate:
    """`model.generate`, for everybody who watches the model; what was found by beams or from drafts is replayed."""

    def __init__(self, model: Any) -> None:
        self.model, self.original = model, model.generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watches, model = _watching(self.model), self.model
        with ExitStack() as stack:
            if not _is_found_late(model, kwargs):
                for watch in watches:
                    stack.enter_context(watch.recorder.generation())
                return self.original(*args, **kwargs)
            # Beams that are dropped, revived and reordered have no rows of their own, and drafts are read that are not
            # kept: what was found in the end has its rows.
            for watch in watches:
                stack.enter_context(watch.quiet())
            first = stack.enter_context(_first_inputs(model))
            found = self.original(*args, **kwargs)
        sequences = found if isinstance(found, Tensor) else found.sequences
        with torch.no_grad():
            model(**_inputs_again(model, sequences, args, kwargs, first))
        return found


def _is_found_late(model: Any, kwargs: dict[str, Any]) -> bool:
    """Does the search read more than what it writes in the end: with beams, or with tokens drafted ahead?"""
    return (_asked(model, kwargs, "num_beams") or 1) > 1 or any(_asked(model, kwargs, name) for name in DRAFTS)


def _asked(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """What `generate` goes by: its argument, that of the config it is handed, or the model's own."""
    given = kwargs.get(name)
    return getattr(kwargs.get("generation_config") or model.generation_config, name, None) if given is None else given


@contextmanager
def _first_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """What the model is first called with in the block."""
    first: dict[str, Any] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        first.update({} if first else kwargs)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield first
    finally:
        hook.remove()


def _inputs_again(
    model: Any, sequences: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], first: dict[str, Any]
) -> dict[str, Any]:
    """The inputs of one forward pass over finished sequences, each with the inputs it was generated from."""
    named, main = dict(kwargs), model.main_input_name
    if args or "inputs" in named:
        named[main] = args[0] if args else named["inputs"]
    takes = inspect.signature(model.forward).parameters
    inputs = {name: x for name, x in named.items() if name in takes and isinstance(x, Tensor)}
    main = EMBEDDED if EMBEDDED in inputs else main
    rows = len(inputs[main]) if main in inputs else len(sequences)
    inputs = {
        name: x.repeat_interleave(len(sequences) // rows, 0) if len(x) == rows else x for name, x in inputs.items()
    }
    if model.config.is_encoder_decoder:
        return {**inputs, "decoder_input_ids": _with_prompt(sequences, first["decoder_input_ids"])}
    size = inputs[main].shape[:2] if main in inputs else (rows, 0)
    prompt = inputs.get("attention_mask", sequences.new_ones(size))
    found = first.get("attention_mask")  # where it was not given: by the padding it found
    if "attention_mask" not in inputs and isinstance(found, Tensor) and found.shape[1:] == prompt.shape[1:]:
        prompt = found[:: len(found) // rows].repeat_interleave(len(sequences) // rows, 0)
    if main == EMBEDDED:  # what is written then follows the ids that were given beside them, if any were
        ids = inputs.pop("input_ids", sequences[:, :0])
        written = sequences[:, ids.shape[1] :]
        inputs[main] = torch.cat((inputs[main], model.get_input_embeddings()(written)), 1)
    else:
        written = sequences[:, prompt.shape[1] :]
        inputs["input_ids"] = sequences
    real = _until_end(_asked(model, kwargs, "eos_token_id"), written)
    mask = inputs["attention_mask"] = torch.cat((prompt, real.to(prompt.dtype)), 1)
    if "position_ids" in takes:
        inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    return inputs


def _with_prompt(sequences: Tensor, prompt: Tensor) -> Tensor:
    """The sequences from the decoder's first token on; some models return them without their prompt."""
    prompt = prompt[:: max(1, len(prompt) // len(sequences))][: len(sequences)]
    whole = torch.equal(sequences[:, : prompt.shape[1]], prompt)
    return sequences if whole else torch.cat((prompt, sequences), 1)


def _until_end(ends: Any, written: Tensor) -> Tensor:
    """True up to and with the token that ends each sequence; `ends` is that token, some of them, or None."""
    if ends is None:
        return torch.ones_like(written, dtype=torch.bool)
    ended = torch.isin(written, torch.as_tensor(ends, device=written.device))
    return ended.cumsum(1) - ended.long() == 0
