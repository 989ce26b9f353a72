"""Predictions of a language model beside its texts: how probable each token was, and which ones were expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...checks import check_int, check_integer_tensor, check_tensor
from ..layer_names import shown_name

CHUNK_ENTRIES = 2**24  # logits whose softmax is taken at a time
TokenNames = Callable[[list[int]], Sequence[str]] | Sequence[str] | Any  # a tokenizer is Any


@dataclass(frozen=True, eq=False)
class Predictions:
    """The tokens that a language model expected at each position, from the tokens before it.

    Position 0 has no prediction: its entries are NaN and -1. The last position, behind the text, is that of the next
    token, which is not known.
    """

    log_probability: Float[Tensor, "b n+1"]  # NaN if no token stands there
    top: Int[Tensor, "b n+1 k"]  # most probable tokens, as numbers in `names`
    top_log_probability: Float[Tensor, "b n+1 k"]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, logits: Float[Tensor, "b n v"], ids: Int[Tensor, "b n"], names: TokenNames | None = None, *, top: int = 5
    ) -> Predictions:
        """Compute predictions from a model's logits: those at position t are for the token at t + 1."""
        check_tensor("logits", logits)
        check_tensor("ids", ids)
        check_integer_tensor("ids", ids, 2)
        if logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise ValueError(
                f"logits must be b n vocabulary for ids of shape {tuple(ids.shape)}, got {tuple(logits.shape)}; "
                "pass out.logits and the input_ids that the model read"
            )
        (b, n), vocabulary = ids.shape, logits.shape[-1]
        check_int("top", top, 1)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(f"ids must be from 0 to {vocabulary - 1}, got {int(ids.min())} to {int(ids.max())}")
        k = min(top, vocabulary)
        own, best = [torch.full((b, 1), torch.nan)], [torch.full((b, 1, k), -1)]
        values = [torch.full((b, 1, k), torch.nan)]
        following = torch.cat([ids[:, 1:], ids.new_zeros(b, 1)], 1)
        step = max(1, CHUNK_ENTRIES // max(1, b * vocabulary))
        for start in range(0, n, step):
            part = logits[:, start : start + step].detach()
            p = part.to(torch.promote_types(part.dtype, torch.float32)).log_softmax(-1)
            found = p.topk(k)
            own.append(p.gather(-1, following[:, start : start + step, None].to(p.device))[..., 0].cpu())
            best.append(found.indices.cpu())
            values.append(found.values.cpu())
        log_probability = torch.cat([x.to(own[-1].dtype) for x in own], 1)
        log_probability[:, -1] = torch.nan
        numbers, places = torch.unique(torch.cat(best, 1), return_inverse=True)
        known = [number for number in numbers.tolist() if number >= 0]
        shift = len(numbers) - len(known)  # -1 stays -1
        return cls(
            log_probability,
            (places - shift).int(),
            torch.cat([x.to(values[-1].dtype) for x in values], 1),
            tuple(_names(known, names)),
        )

    @property
    def tokens(self) -> int:
        """The number of tokens of each text, with padding."""
        return self.log_probability.shape[1] - 1

    def without_padding(self, real: Bool[Tensor, "b n"]) -> Predictions:
        """Return the predictions of real tokens from real tokens alone."""
        first = torch.zeros(len(real), 1, dtype=torch.bool)
        before = torch.cat([first, real.cpu()], 1)
        own = before & torch.cat([real.cpu(), first], 1)
        return Predictions(
            self.log_probability.masked_fill(~own, torch.nan),
            self.top.masked_fill(~before[..., None], -1),
            self.top_log_probability.masked_fill(~before[..., None], torch.nan),
            self.names,
        )


def prediction_mismatch(predictions: Predictions, shapes: Mapping[str, tuple[int, int, int]]) -> str | None:
    """Return a warning if predictions fit no layer; `shapes` are (batch rows, queries, keys) by layer name."""
    b, n = len(predictions.log_probability), predictions.tokens
    if not shapes or any((b, n) == (rows, queries) for rows, queries, _ in shapes.values()):
        return None
    name, (rows, queries, _) = next(iter(shapes.items()))
    return (
        f"predictions of {b} texts of {n} tokens were given, but {shown_name(name)!r} has {rows} batch rows of "
        f"{queries} queries; pass the logits and ids of the forward pass that was captured"
    )


def _names(ids: list[int], names: TokenNames | None) -> list[str]:
    """Return the text of each token."""
    if names is None:
        return [str(number) for number in ids]
    convert = getattr(names, "convert_ids_to_tokens", names)
    found = convert(ids) if callable(convert) else [convert[number] for number in ids]
    if len(found) != len(ids):
        raise ValueError(f"names returned {len(found)} tokens for {len(ids)} ids; return one for each")
    return [str(token) for token in found]
