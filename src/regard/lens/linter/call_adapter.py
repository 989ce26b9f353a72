"""Call a layer, a model or a function that attends, whatever its arguments are named.

The signature says which arguments are tokens (`x`, `input_ids`, or `query`, `key` and `value`), which are another
sequence (`context`, `memory`), masks and caches. Inputs are made up: random vectors, or random ids of the vocabulary.
The checks see one layout, whatever the module's own is: tokens are b n or b n d, outputs b n e.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..audit.model_copy import CannotAudit, copy_model, same_random_state, tensors_in
from ..eager.head_layout import HEAD_COUNT_NAMES

QUERIES = re.compile(r"(x_?|in_?)?(q|query|queries|query_states)(_?(in|input|tokens|x))?", re.IGNORECASE)
KEYS = re.compile(r"(x_?|in_?)?(k|key|keys|key_states)(_?(in|input|tokens|x))?", re.IGNORECASE)
VALUES = re.compile(r"(x_?|in_?)?(v|value|values|value_states)(_?(in|input|tokens|x))?", re.IGNORECASE)
CONTEXT = re.compile(
    r"context|memory|cond|kv|key_value_states|encoder_(hidden_states|outputs?|out)|enc(_out(put)?)?|source"
)
IDS = re.compile(r"(input_|token_|word_)?ids?|idx|tokens|indices|input_tokens", re.IGNORECASE)
IMAGES = re.compile(r"pixel_values|images?|imgs?|pixels", re.IGNORECASE)
AUDIO = re.compile(r"input_(features|values)|(audio|speech|waveforms?|spectrograms?|mels?)(_(features|values))?")
CACHE = re.compile(r"(past_key_values?|layer_past|past|kv_?cache|cache|past_kv)")
MASK = re.compile(r".*mask.*|keep|.*valid.*|.*pad(ding)?|.*lengths?|.*lens", re.IGNORECASE)
HEADS = re.compile("|".join(re.escape(name) for name in HEAD_COUNT_NAMES if name != "h"))
WIDTHS = (
    "dim",
    "embed_dim",
    "d_model",
    "model_dim",
    "hidden_size",
    "n_embd",
    "emb_dim",
    "embed_size",
    "hidden_dim",
    "width",
)
LENGTHS = (7, 11, 13, 5)  # tokens; primes, so that no other size is equal to one
CONTEXT_LENGTH = 9  # tokens of the other sequence
BATCHES = (3, 2, 5)
HEAD_DIM = 6  # assumed for functions, which have no weights
OUTPUTS = ("logits", "last_hidden_state")


class CannotCall(ValueError):
    """The reasons why no call of a module ran."""


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class CallAdapter:
    """A copy of a module in evaluation, in float64 if it runs so, and one way to call it.

    Outputs are b n e, or b e if the module returns one vector for a text. Each call starts from the same random state.
    """

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        inputs: Sequence[Tensor] = (),
        *,
        dim: int | None = None,
        heads: int | None = None,
        batch_first: bool | None = None,
    ) -> None:
        self.is_function = not isinstance(module, nn.Module)
        original = module if isinstance(module, nn.Module) else _Function(module)
        self.name = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "function")
        try:
            signature = inspect.signature(module if self.is_function else original.forward)
        except ValueError:
            raise CannotCall(f"{self.name} shows no signature; pass lambda q, k, v: {self.name}(q, k, v)") from None
        self.parameters = dict(signature.parameters)
        try:
            self.module = copy_model(original).eval()
        except CannotAudit as reason:
            raise CannotCall(f"{self.name} cannot be checked: {reason}") from reason
        self.config = getattr(original, "config", None)
        first = next((x for x in original.parameters() if x.is_floating_point()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.dtype = torch.float64
        self.heads = heads or _number(original, self.config, HEAD_COUNT_NAMES) or (4 if self.is_function else None)
        self.batch_first = _is_batch_first(original) if batch_first is None else batch_first
        self._find_roles()
        self.batch = next(b for b in BATCHES if b != self.heads)
        named = dict(zip(self.parameters, inputs, strict=False))
        self.example = named.pop(self.main[0], None if self.audio in named else next(iter(inputs), None))
        self.fixed: dict[str, Any] = {n: x for n, x in named.items() if n not in (*self.main, *self.context)}
        self.random_state = 0
        self.reads_context_only = False  # whether masks are those of the other sequence, whatever their names
        self.lengths = [n for n in LENGTHS if n not in (self.heads, dim)]
        self._find_call(original, dim)

    @property
    def signal(self) -> str:
        """The continuous input of a module whose tokens are not its input's positions."""
        return "audio" if self.main[0] == self.audio else "images"

    # The call

    def tokens(self, n: int, seed: int = 0) -> Tensor:
        """Return made-up tokens: vectors b n d or ids b n."""
        return self._draw((self.batch, n), seed)

    def change(self, x: Tensor, token: int, seed: int = 0, *, text: slice = slice(None)) -> Tensor:
        """Return x with another token at one position, in all texts or in some."""
        other, new = x.clone(), self._draw((x.shape[0], 1), seed + 1000 + token)[:, 0]
        if self.kind == "ids":
            same = new == x[:, token]
            new = torch.where(same, self._next_id(new), new)
        other[text, token] = new[text]
        return other

    def run(self, x: Tensor, context: Tensor | None = None, **extra: Any) -> Tensor:
        """Call the module; return its output, b n e or b e."""
        return self.output(self.call(x, context, **extra))

    def call(self, x: Tensor, context: Tensor | None = None, **extra: Any) -> Any:
        """Call the module; return what it returns."""
        given: dict[str, Any] = {name: self._own_layout(x) for name in self.main}
        if self.context:
            context = self.context_tokens(x.shape[0]) if context is None else context
            given |= {name: self._own_layout(context) for name in self.context}
        n = x.shape[1]
        if self.has_one_query:
            given[self.main[0]] = x[:, 0]  # the first token is never padding
        given |= {name: self._open_mask(fill, n) for name, fill in self.open_masks.items()} | self.fixed | extra
        if self.audio in self.fixed:  # one recording for all texts
            heard = self.fixed[self.audio][:1].to(self.dtype)
            given[self.audio] = heard.expand(len(x), *heard.shape[1:])
        if self.is_positional:
            args, given = [given.pop(name) for name in self.main], given
        else:
            args = [given.pop(name) for name in [*self.parameters][: self.positional_only]]
        with torch.no_grad(), same_random_state(self.module), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(self.random_state)
            return self.module(*args, **given)

    def output(self, out: Any) -> Tensor:
        """Return the tensor of an output that has the tokens, b n e; the first one if none has."""
        if isinstance(out, Mapping):
            out = [out[name] for name in OUTPUTS if name in out] or out
        floats = [x for x in tensors_in(out) if x.is_floating_point()]
        if not floats:
            raise CannotCall(f"{self.name} returned no tensor of floating-point numbers")
        x = floats[0]
        if self.axis == 2 and x.ndim == 4:
            return x.transpose(1, 2).flatten(2)  # b h n e -> b n (h e)
        return x.transpose(0, 1) if self.axis == 0 and x.ndim > 2 else x

    def context_tokens(self, batch: int, n: int = CONTEXT_LENGTH, seed: int = 77) -> Tensor:
        """Return made-up tokens of the other sequence."""
        return self._draw((batch, n), seed)

    def _open_mask(self, fill: int | None, n: int) -> Tensor | None:
        """Return a mask n n that hides nothing, for modules that require one."""
        return None if fill is None else torch.full((n, n), fill, device=self.device)

    def _draw(self, shape: tuple[int, ...], seed: int) -> Tensor:
        numbers = torch.Generator().manual_seed(seed)
        if self.kind == "images":
            size = self._image_shape()
            return torch.randn(shape[0], *size, generator=numbers, dtype=torch.float64).to(self.device, self.dtype)
        if self.kind == "ids":
            picked = torch.randint(len(self.vocabulary), shape, generator=numbers)
            return self.vocabulary[picked].to(self.device)
        return torch.randn(*shape, self.dim, generator=numbers, dtype=torch.float64).to(self.device, self.dtype)

    def _image_shape(self) -> tuple[int, ...]:
        """Return channels, height and width: of the example, else by the config."""
        if self.example is not None:
            return tuple(self.example.shape[1:])
        size = getattr(self.config, "image_size", None) or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return int(getattr(self.config, "num_channels", None) or 3), int(height), int(width)

    def _next_id(self, ids: Tensor) -> Tensor:
        places = torch.searchsorted(self.vocabulary.to(ids.device), ids)
        return self.vocabulary.to(ids.device)[(places + 1) % len(self.vocabulary)]

    def _own_layout(self, x: Tensor) -> Tensor:
        if x.ndim == 3 and self.axis == 2:
            return x.unflatten(-1, (self.heads or 1, -1)).transpose(1, 2)  # b n (h d) -> b h n d
        return x.transpose(0, 1).contiguous() if self.axis == 0 and (x.ndim == 3 or self.kind == "ids") else x

    # The signature

    def _find_roles(self) -> None:
        """Sort the arguments into tokens, the other sequence, masks and caches."""
        names = [name for name, p in self.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        required = [name for name in names if self.parameters[name].default is inspect.Parameter.empty]
        kinds = [self.parameters[name].kind for name in names]
        self.positional_only = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
        self.masks = [name for name in names if MASK.fullmatch(name) and not CACHE.fullmatch(name)]
        self.caches = [name for name in names if CACHE.fullmatch(name)]
        triple = [next((n for n in names if role.fullmatch(n)), None) for role in (QUERIES, KEYS, VALUES)]
        free = [n for n in required if n not in self.masks and n not in self.caches and not HEADS.fullmatch(n)]
        self.is_positional = not names
        self.audio = next((n for n in names if AUDIO.fullmatch(n)), "")
        self.has_one_query = False  # the first argument is one vector for a text, b d
        self.main: tuple[str, ...]
        self.context: tuple[str, ...] = ()
        if not names:
            self.main = ("x",)
        elif all(triple[:2]):
            self.main = tuple(name for name in triple if name)
        elif "decoder_input_ids" in names:
            self.main = ("decoder_input_ids",)
            self.context = ("input_ids",) if "input_ids" in names else ()
            if not self.context:  # the other masks are those of the audio or the image that the encoder reads
                self.masks = [name for name in self.masks if name.startswith("decoder")]
        elif {"source", "inputs"} <= set(names):
            self.main, self.context = ("inputs",), ("source",)
        elif "tgt" in names:
            self.main = ("tgt",)
            self.context = tuple(name for name in ("memory", "src") if name in required)
        else:
            self.main = (next((n for n in ("input_ids", "inputs_embeds") if n in names), [*free, *names][0]),)
            self.context = tuple(name for name in free if CONTEXT.fullmatch(name) and name not in self.main)
        self.has_decoder_ids = "decoder_input_ids" in names
        self.open_masks: dict[str, int | None] = {}
        self.required = [n for n in required if n not in (*self.main, *self.context)]

    def _find_call(self, original: nn.Module, dim: int | None) -> None:
        """Find a kind of input, a width and a number format with which the module runs."""
        if self.audio and self.example is None and self.audio not in self.fixed:
            raise CannotCall(
                f"{self.name} reads audio as {self.audio}, in sizes of its own; pass an example, "
                f"check(model, {self.audio})"
            )
        errors = []
        own = self.main, self.context
        # A layer for one decoder step, layer(state, keys), reads a query b d; some run, wrongly, on queries b n d too.
        is_pair = len(own[0] + own[1]) > 1
        for has_one_query, any_output in ((False, False), (True, True), (False, True)) if is_pair else ((False, True),):
            self.has_one_query = has_one_query
            self.main, self.context = (own[0] + own[1], ()) if has_one_query else own
            for kind, axis, width, dtype in self._ways(original, dim):
                self.kind, self.axis, self.dim, self.dtype = kind, axis, width, dtype
                if (error := self._error(original, any_output=any_output)) is None:
                    return
                errors.append(error)
        tried = "; ".join(dict.fromkeys(errors)) or "no way to call it was found"
        raise CannotCall(
            f"{self.name} could not be called: {tried}. Pass an example input, check(model, x), or dim= and heads=, or "
            "a function of the tokens that calls it, check(lambda x: layer(x[:, 0], x), dim=64)"
        )

    def _ways(self, original: nn.Module, dim: int | None) -> Iterator[tuple[str, int, int, torch.dtype]]:
        """Yield kinds of input, axes of the tokens, widths and number formats, in the order in which they are tried."""
        self.vocabulary = _vocabulary(original, self.config)
        for kind in self._kinds(original, dim):
            for axis in self._axes():
                for width in self._widths(original, dim) if kind == "vectors" else [0]:
                    for dtype in (torch.float64, torch.float32):
                        yield kind, axis, width, dtype

    def _error(self, original: nn.Module, *, any_output: bool) -> str | None:
        """Return why the call does not run, or has not one output for each token; None if it does."""
        self.module = copy_model(original).eval()
        if self.dtype == torch.float64:
            if any(type(x) is not nn.Parameter for x in self.module.parameters()):
                return "its parameters cannot be copied"
            self.module = self.module.double()
        else:
            first = next((x for x in original.parameters() if x.is_floating_point()), None)
            self.dtype = torch.float32 if first is None else first.dtype
        for name in self.required:
            if HEADS.fullmatch(name) or name == "h":
                self.fixed[name] = self.heads or 1
        masks = [name for name in self.required if name in self.masks]
        try:
            for fill in (None, 1, 0):
                self.open_masks = dict.fromkeys(masks, fill)
                with suppress(*([] if fill == 0 or not masks else [Exception])):
                    out = self.run(self.tokens(self.lengths[0]))
                    if not masks or not bool(out.isnan().any()):
                        break
        except Exception as error:  # the module may raise anything
            shape = {"ids": "token ids", "images": self.signal}.get(self.kind, f"vectors of width {self.dim}")
            line, *_ = [*str(error).strip().splitlines(), ""]
            return f"{shape}: {type(error).__name__}: {line.rstrip('.')}"
        if bool(out.isnan().all()):
            self.lengths.sort(key=self._is_too_short)
        fits = out.ndim > 1 and (any_output or out.shape[:2] == (self.batch, self.lengths[0]))
        return None if fits else f"it returns a tensor of shape {tuple(out.shape)}"

    def _is_too_short(self, n: int) -> bool:
        """Return whether texts of n tokens give NaN alone, as after a convolution with a stride."""
        try:
            return bool(self.run(self.tokens(n)).isnan().all())
        except Exception:  # the module may raise anything on other lengths
            return True

    def _kinds(self, original: nn.Module, dim: int | None) -> list[str]:
        named = IMAGES.fullmatch(self.main[0]) is not None or self.main[0] == self.audio
        if named or (self.example is not None and self.example.ndim == 4 and not self.is_function):
            return ["images"]
        if self.example is not None:
            return ["vectors" if self.example.is_floating_point() else "ids"]
        if dim is not None:
            return ["vectors"]
        has_embedding = any(isinstance(module, nn.Embedding) for module in original.modules())
        named = IDS.fullmatch(self.main[0]) is not None
        return ["ids"] if named and has_embedding else ["ids", "vectors"] if has_embedding else ["vectors"]

    def _axes(self) -> list[int]:
        """Return where tokens may be in the input: 1 in b n d, 0 in n b d, 2 in b h n d."""
        if self.example is not None and self.example.ndim == 4:
            return [2]
        if not self.batch_first:
            return [0]
        takes_heads = any(HEADS.fullmatch(name) for name in self.parameters) or "h" in self.parameters
        return [2, 1] if self.is_function and not takes_heads and len(self.main) == 3 else [1]

    def _widths(self, original: nn.Module, dim: int | None) -> list[int]:
        if self.example is not None:
            return [self.example.shape[-1] * (self.example.shape[1] if self.example.ndim == 4 else 1)]
        if dim is not None:
            return [dim]
        if self.is_function:
            return [(self.heads or 1) * HEAD_DIM]
        given: list[int | None] = [_number(original, self.config, WIDTHS)]
        given += [module.in_features for module in original.modules() if isinstance(module, nn.Linear)][:1]
        given += [module.normalized_shape[0] for module in original.modules() if isinstance(module, nn.LayerNorm)][:1]
        return list(dict.fromkeys(width for width in given if width))


def _number(module: nn.Module, config: Any, names: Sequence[str]) -> int | None:
    """Return the first attribute among `names` that is a number, in the module, its config or its submodules."""
    for each in (module, config, *module.modules()):
        for name in names:
            value = getattr(each, name, None)
            if type(value) is int and value > 0:
                return value
    return None


def _is_batch_first(module: nn.Module) -> bool:
    """Return whether inputs are b n d: layers of PyTorch say, others do unless they say otherwise."""
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        module = module.layers[0]
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    return bool(getattr(module, "batch_first", True))


def _vocabulary(module: nn.Module, config: Any) -> Tensor:
    """Return the ids that are no special tokens."""
    sizes = [each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)]
    with suppress(AttributeError, NotImplementedError):  # the module is not of transformers
        sizes = [module.get_input_embeddings().num_embeddings]  # type: ignore[operator]
    size = min([getattr(config, "vocab_size", None) or sizes[0], sizes[0]]) if sizes else 2
    special: set[Any] = (
        {value for name, value in vars(config).items() if "token" in name and type(value) is int} if config else set()
    )
    special |= {each.padding_idx for each in module.modules() if isinstance(each, nn.Embedding)}
    ids = [n for n in range(min(size, 10_000)) if n not in special]
    return torch.tensor(ids[3:] if len(ids) > 20 else ids)
