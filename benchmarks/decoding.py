"""Decoding beside transformers' `generate`: the same weights, the same tokens out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from regard.decode import beam, greedy, sample
from regard.models.pretrained import load

VOCABULARY, DIM, LAYERS, HEADS, READ, NEW = 32_000, 512, 6, 8, 16, 32
END, START = 0, 1
Tokens = list[tuple[int, ...]]


def decoding(kind: str, rows: int, width: int) -> Callable[[], dict[str, Callable[[], object]]]:
    """Calls that write 32 tokens (8 for many rows) after 16 of each row; that they write the same is checked first."""

    def build() -> dict[str, Callable[[], object]]:
        theirs, ours = pair(kind)
        torch.manual_seed(1)
        ids, new = torch.randint(3, VOCABULARY, (rows, READ)), NEW if rows == 1 else 8
        given: Any = (ids[:, :-1], ids[:, -1:]) if kind == "gpt2" else ({"source": ids}, [[START]] * rows)
        skip = READ if kind == "gpt2" else 1

        def regard() -> Tokens:
            if width == 1:
                return [one.tokens for one in greedy(ours, *given, end=END, max_length=new)]
            return [best[0].tokens for best in beam(ours, *given, width=width, end=END, max_length=new)]

        def generate() -> Tokens:
            options = {} if width == 1 else {"length_penalty": 0.0}  # beams ranked by the sum of log-probabilities
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=width,
                max_new_tokens=new,
                **options,
            )
            written = [tuple(row[skip:]) for row in out.tolist()]
            return [row[: row.index(END) + 1] if END in row else row for row in written]

        if regard() != generate():
            raise SystemExit(
                f"error: {kind}, {rows} rows, beam {width}: other tokens than generate; nothing was measured"
            )
        return {"regard": regard, "generate": generate}

    return build


def ragged(search: Callable[..., Any], **options: Any) -> Callable[[], dict[str, Callable[[], object]]]:
    """Calls that write 32 tokens after prompts of 4 to 28 tokens, and after as many of 16; alone each is the same."""

    def build() -> dict[str, Callable[[], object]]:
        _, ours = pair("gpt2")
        torch.manual_seed(1)
        lengths = (4, 10, 22, 28)
        uneven = [torch.randint(3, VOCABULARY, (n,)).tolist() for n in lengths]
        even = [torch.randint(3, VOCABULARY, (sum(lengths) // len(lengths),)).tolist() for _ in lengths]

        def write(prompts: list[list[int]], **changed: Any) -> list[Any]:
            return search(ours, None, prompts, end=None, max_length=NEW, **(options | changed))

        def tokens(found: list[Any]) -> list[Any]:
            return [x[0].tokens if isinstance(x, list) else x.tokens for x in found]

        seeds: list[dict[str, int]] = [{"seed": n} if search is sample else {} for n in range(len(uneven))]
        alone = [write([prompt], **seed)[0] for prompt, seed in zip(uneven, seeds, strict=True)]
        if tokens(write(uneven)) != tokens(alone):
            raise SystemExit("error: prompts of different lengths: other tokens than one by one; nothing was measured")
        return {"different lengths": lambda: write(uneven), "equal lengths": lambda: write(even)}

    return build


def floor(kind: str) -> Callable[[], dict[str, Callable[[], object]]]:
    """The products of one row with every matrix a step reads, as often as greedy search does, and nothing else."""

    def build() -> dict[str, Callable[[], object]]:
        _, ours = pair(kind)
        stepping: Any = ours if kind == "gpt2" else ours.decoder
        once = ("positions", "cross.key", "cross.value")  # not read, or read once a source
        matrices = [
            x for name, x in stepping.named_parameters() if x.ndim == 2 and not any(part in name for part in once)
        ]
        rows = {n: torch.randn(1, n) for n in {x.shape[1] for x in matrices}}

        def products() -> None:
            with torch.no_grad():
                for _ in range(NEW):
                    for x in matrices:
                        nn.functional.linear(rows[x.shape[1]], x)

        return {"products": products, "generate": decoding(kind, 1, 1)()["generate"]}

    return build


@cache
def pair(kind: str) -> tuple[Any, nn.Module]:
    """The same random model, theirs and ours."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = {"gpt2": gpt2, "marian": marian}[kind](transformers).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, load(folder)


def gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=DIM,
        n_head=HEADS,
        n_layer=LAYERS,
        initializer_range=0.1,  # loud enough that rounding decides nothing
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=START,
    )
    return transformers.GPT2LMHeadModel(config)


def marian(transformers: Any) -> Any:
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=DIM,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * DIM,
        decoder_ffn_dim=4 * DIM,
        bos_token_id=None,
        eos_token_id=END,
        forced_eos_token_id=None,
        pad_token_id=START,
        decoder_start_token_id=START,
        activation_function="swish",
        scale_embedding=True,
    )
    model = transformers.MarianMTModel(config)
    with torch.no_grad():  # so that what is written varies, and depends on what is read
        nn.init.normal_(model.model.shared.weight, std=DIM**-0.5)
        for layer in model.model.decoder.layers:
            layer.fc2.weight *= 10
    return model
