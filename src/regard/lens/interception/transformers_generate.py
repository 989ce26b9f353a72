"""Record `generate` of Hugging Face models: its forward passes belong to one text that grows.

With beam search or drafted tokens (assisted generation), most of what the model attends to is dropped again. So nothing
is recorded during the search, and the finished sequences run through the model once more, in one forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .function_mode import AttentionMode

DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # options of assisted generation
COMPILED_CALL = "get_compiled_call"  # the method that compiles the call of the model
EMBEDDED = "inputs_embeds"  # a prompt given as vectors has no token ids

ModesOf = Callable[[nn.Module], list[AttentionMode]]


def wrap_generate(parts: list[nn.Module], modes_of: ModesOf) -> list[nn.Module]:
    """Wrap `generate`, and what compiles its steps, of the modules that have them; return these modules.

    With a static cache, `generate` compiles the call of the model by itself; while a mode intercepts the model, its
    steps run uncompiled.
    """
    kinds = {kind for kind in set(map(type, parts)) if hasattr(kind, "prepare_inputs_for_generation")}
    generating = [part for part in parts if type(part) in kinds] if kinds else []
    for part in generating:
        own = part.__dict__
        for name, wrapper in WRAPPERS.items():
            if name not in own and hasattr(part, name):
                own[name] = wrapper(part, modes_of)
    return generating


def unwrap_generate(part: nn.Module) -> None:
    """Restore the methods of a module, unless the user has replaced them."""
    own = part.__dict__
    for name, wrapper in WRAPPERS.items():
        if type(own.get(name)) is wrapper:
            del own[name]


class _StepsAsWritten:
    """`model.get_compiled_call` for every mode that intercepts the model."""

    def __init__(self, model: Any, modes_of: ModesOf) -> None:
        self.model, self.original, self.modes_of = model, getattr(model, COMPILED_CALL), modes_of

    def __reduce__(self) -> Any:
        """A copy or a pickle of the model has the method of its class."""
        return getattr, (self.model, COMPILED_CALL)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.__call__ if self.modes_of(self.model) else self.original(*args, **kwargs)


class _Generate:
    """`model.generate` for every mode that records the model; others see its steps."""

    def __init__(self, model: Any, modes_of: ModesOf) -> None:
        self.model, self.original, self.modes_of = model, model.generate, modes_of

    def __reduce__(self) -> Any:
        """A copy or a pickle of the model has the method of its class."""
        return getattr, (self.model, "generate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes, model = [mode for mode in self.modes_of(self.model) if mode.is_observer], self.model
        if not modes:
            return self.original(*args, **kwargs)
        with ExitStack() as stack:
            if not _needs_replay(model, kwargs):
                for mode in modes:
                    if mode.recorder is not None:
                        stack.enter_context(mode.recorder.generation())
                return self.original(*args, **kwargs)
            # Beams are dropped, revived and reordered, and drafts are read that are not kept: replay the result.
            for mode in modes:
                stack.enter_context(mode.quiet())
            first = stack.enter_context(_first_inputs(model))
            result = self.original(*args, **kwargs)
        sequences = result if isinstance(result, Tensor) else result.sequences
        with torch.no_grad():
            model(**_replay_inputs(model, sequences, args, kwargs, first))
        return result


# Name of a method -> the class of what replaces it.
WRAPPERS: dict[str, Any] = {"generate": _Generate, COMPILED_CALL: _StepsAsWritten}


def _needs_replay(model: Any, kwargs: dict[str, Any]) -> bool:
    """True with beam search or drafted tokens: then the model reads tokens that the result does not keep."""
    return (_option(model, kwargs, "num_beams") or 1) > 1 or any(_option(model, kwargs, name) for name in DRAFTS)


def _option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Return an option of `generate`: its argument, else that of the generation config passed, else of the model."""
    given = kwargs.get(name)
    return getattr(kwargs.get("generation_config") or model.generation_config, name, None) if given is None else given


@contextmanager
def _first_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Collect the keyword arguments of the first call of the model within the block."""
    first: dict[str, Any] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        first.update({} if first else kwargs)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield first
    finally:
        hook.remove()


def _replay_inputs(
    model: Any, sequences: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], first: dict[str, Any]
) -> dict[str, Any]:
    """Return the inputs of one forward pass over finished sequences, each with the inputs it was generated from."""
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
    inferred = first.get("attention_mask")  # if the user passed none, transformers has inferred it from padding
    if "attention_mask" not in inputs and isinstance(inferred, Tensor) and inferred.shape[1:] == prompt.shape[1:]:
        prompt = inferred[:: len(inferred) // rows].repeat_interleave(len(sequences) // rows, 0)
    if main == EMBEDDED:  # generated tokens follow the ids that were passed beside the vectors, if any
        ids = inputs.pop("input_ids", sequences[:, :0])
        written = sequences[:, ids.shape[1] :]
        inputs[main] = torch.cat((inputs[main], model.get_input_embeddings()(written)), 1)
    else:
        written = sequences[:, prompt.shape[1] :]
        inputs["input_ids"] = sequences
    real = _until_end(_option(model, kwargs, "eos_token_id"), written)
    mask = inputs["attention_mask"] = torch.cat((prompt, real.to(prompt.dtype)), 1)
    if "position_ids" in takes:
        inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    return inputs


def _with_prompt(sequences: Tensor, prompt: Tensor) -> Tensor:
    """Return the sequences from the decoder's first token on; some models return them without their prompt."""
    prompt = prompt[:: max(1, len(prompt) // len(sequences))][: len(sequences)]
    whole = torch.equal(sequences[:, : prompt.shape[1]], prompt)
    return sequences if whole else torch.cat((prompt, sequences), 1)


def _until_end(ends: Any, written: Tensor) -> Tensor:
    """Return True up to and including the end token of each sequence; `ends` is a token id, several, or None."""
    if ends is None:
        return torch.ones_like(written, dtype=torch.bool)
    ended = torch.isin(written, torch.as_tensor(ends, device=written.device))
    return ended.cumsum(1) - ended.long() == 0
