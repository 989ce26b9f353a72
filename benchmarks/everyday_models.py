"""Everyday models: encoders, padded batches, sliding windows, generation, decoding and training.

Models of transformers with random weights: their plain pass, the same under `capture`, with summaries and with the
table of every head, and the eager pass that returns the weights. Then our decoding beside `generate` with a static
cache, which transformers compiles, and the training of a language model beside the same model compiled.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.decode import beam, greedy, sample
from regard.lens import capture
from regard.models import Gpt, GptConfig
from regard.models.pretrained import load

from .everyday_cases import Call, Case, Size

WATCHED = {"capture": 1.15, "capture, summaries": 1.5, "capture, table": 1.6}
VOCABULARY = 1_000


def cases() -> Iterator[Case]:
    baseline = ("plain",)
    yield Case("BERT-base, 32 x 512, padded", functools.partial(passes, bert), baseline, WATCHED)
    yield Case("ViT-B, 64 x 197", functools.partial(passes, vit), baseline, WATCHED)
    yield Case("Whisper-base shape, 8 x (1500, 128)", functools.partial(passes, whisper), baseline, {"capture": 1.05})
    yield Case("Llama, 8 layers, 8 x 2048, left-padded", functools.partial(passes, llama), baseline, {"capture": 1.05})
    name = "Gemma-3 shape, d 256, window 512, N 16384"
    yield Case(name, functools.partial(passes, gemma, eager=False), baseline, {"capture": 1.05})
    name = "Mistral shape, window 4096, N 32768"
    yield Case(name, functools.partial(passes, mistral, eager=False), baseline, {"capture": 1.05}, takes=20)
    yield Case("generate, greedy, 1024 + 128 tokens", generation, baseline, {"capture": 1.15}, takes=15)
    for search in ("greedy decoding", "sampling", "beam search of 4"):
        for rows in (1, 64):
            name, build = f"{search}, GPT-2 shape, 6 x 512, {rows} rows", functools.partial(decoding, search, rows)
            yield Case(name, build, ("generate, static cache",), {"regard": 0.67}, takes=40)
    yield Case("greedy decoding, Marian shape, prefixes as lists", translation, ("generate",), {"regard": 0.67})
    yield Case(
        "training GPT 12 x 768, 16 x 1024",
        training,
        ("regard, compiled", "transformers, compiled"),
        grad=True,
        takes=50,
    )
    yield Case("Gpt.loss compiled, two sizes and three lengths", compiled_sizes, (), grad=True, takes=60)


def passes(make: Callable[[Size], tuple[Any, dict[str, Tensor]]], size: Size, *, eager: bool = True) -> dict[str, Call]:
    """The plain pass of a model, what watches it, and its eager pass."""
    model, inputs = make(size)

    def plain() -> object:
        return model(**inputs)[0]

    def watched() -> Any:
        with capture(model) as tape:
            model(**inputs)
        return tape

    def summarized() -> object:
        tape = watched()
        tape.summarize()
        return tape

    def entropies() -> object:
        with capture(model, keep=["entropy"]) as tape:
            model(**inputs)
        return tape

    def stored() -> object:
        with by(model, "eager"):
            return model(**inputs, output_attentions=True).values()

    calls: dict[str, Call] = {
        "plain": plain,
        "capture": watched,
        "capture, summaries": summarized,
        "capture, table": lambda: watched().table(),
        "capture, entropy alone": entropies,
    }
    return calls | ({"eager with weights": stored} if eager else {})


@contextmanager
def by(model: Any, implementation: str) -> Iterator[None]:
    """Let the model attend in another way within the block."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def built(kind: str, config: Any, size: Size) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    with size.device:  # weights drawn on a GPU take no time
        model = getattr(library(), kind)(config)
    return model.to(size.dtype).eval().requires_grad_(False)


@functools.cache
def library() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def tokens(b: int, n: int, size: Size) -> Tensor:
    return torch.randint(3, VOCABULARY, (b, n), device=size.device)


def padding(b: int, n: int, size: Size) -> Tensor:
    """Texts of n / 8 to n tokens, the longest of them whole: ones before zeros, `b n`."""
    lengths = torch.linspace(n / 8, n, b, device=size.device).long()
    return (torch.arange(n, device=size.device) < lengths[:, None]).long()


def bert(size: Size) -> tuple[Any, dict[str, Tensor]]:
    b, n = size.of(32, 2), size.of(512, 16)
    config = library().BertConfig(num_hidden_layers=size.of(12, 2), vocab_size=VOCABULARY)
    model = built("BertModel", config, size)
    return model, {"input_ids": tokens(b, n, size), "attention_mask": padding(b, n, size)}


def vit(size: Size) -> tuple[Any, dict[str, Tensor]]:
    side = size.of(224, 48)
    config = library().ViTConfig(num_hidden_layers=size.of(12, 2), image_size=side)
    model = built("ViTModel", config, size)
    return model, {"pixel_values": torch.randn(size.of(64, 2), 3, side, side, device=size.device, dtype=size.dtype)}


def whisper(size: Size) -> tuple[Any, dict[str, Tensor]]:
    b, n = size.of(8, 2), size.of(1500, 30)
    config = library().WhisperConfig(
        d_model=512,
        encoder_layers=size.of(6, 1),
        decoder_layers=size.of(6, 1),
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        vocab_size=VOCABULARY,
        max_source_positions=n,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = torch.randn(b, 80, 2 * n, device=size.device, dtype=size.dtype)
    model = built("WhisperModel", config, size)
    return model, {"input_features": features, "decoder_input_ids": tokens(b, size.of(128, 8), size)}


def llama(size: Size) -> tuple[Any, dict[str, Tensor]]:
    b, n = size.of(8, 2), size.of(2048, 32)
    return built("LlamaModel", llama_config(size), size), {
        "input_ids": tokens(b, n, size),
        "attention_mask": padding(b, n, size).flip(1),
    }


def llama_config(size: Size) -> Any:
    return library().LlamaConfig(
        hidden_size=size.of(2048, 64),
        intermediate_size=size.of(8192, 128),
        num_hidden_layers=size.of(8, 2),
        num_attention_heads=size.of(16, 4),
        num_key_value_heads=size.of(4, 2),
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def gemma(size: Size) -> tuple[Any, dict[str, Tensor]]:
    config = library().Gemma3TextConfig(
        hidden_size=size.of(1152, 64),
        intermediate_size=size.of(6912, 128),
        num_hidden_layers=size.of(12, 2),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=size.of(256, 16),
        sliding_window=size.of(512, 8),
        vocab_size=VOCABULARY,
        max_position_embeddings=32_768,
    )
    return built("Gemma3TextModel", config, size), {"input_ids": tokens(1, size.of(16_384, 64), size)}


def mistral(size: Size) -> tuple[Any, dict[str, Tensor]]:
    config = library().MistralConfig(
        hidden_size=size.of(2048, 64),
        intermediate_size=size.of(8192, 128),
        num_hidden_layers=size.of(8, 2),
        num_attention_heads=size.of(16, 4),
        num_key_value_heads=size.of(4, 2),
        sliding_window=size.of(4096, 8),
        vocab_size=VOCABULARY,
        max_position_embeddings=32_768,
    )
    return built("MistralModel", config, size), {"input_ids": tokens(1, size.of(32_768, 64), size)}


def generation(size: Size) -> dict[str, Call]:
    """Greedy `generate`, plain and under `capture`."""
    model = built("LlamaForCausalLM", llama_config(size), size)
    ids, new = tokens(1, size.of(1024, 16), size), size.of(128, 4)

    def plain() -> object:
        ones = torch.ones_like(ids)
        return model.generate(ids, attention_mask=ones, do_sample=False, min_new_tokens=new, max_new_tokens=new)

    def watched() -> object:
        with capture(model) as tape:
            plain()
        return tape

    return {"plain": plain, "capture": watched}


def decoding(search: str, rows: int, size: Size) -> dict[str, Call]:
    """Our search beside `generate` over the same weights, with a cache that grows and with a static one."""
    config = library().GPT2Config(
        vocab_size=size.of(32_000, 100),
        n_embd=size.of(512, 32),
        n_head=size.of(8, 2),
        n_layer=size.of(6, 2),
        initializer_range=0.1,  # loud enough that rounding decides nothing
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    theirs = built("GPT2LMHeadModel", config, size._replace(dtype=torch.float32))
    ours = loaded(theirs, size)
    n, new = size.of(64, 8), size.of(64, 4)
    ids = torch.randint(3, 90, (rows if not size.tiny else 2, n), device=size.device)

    prompt = {"source": ids[:, :-1], "prefix": ids[:, -1:], "end": None, "max_length": new}
    options: dict[str, dict[str, Any]] = {
        "greedy decoding": {"do_sample": False},
        "sampling": {"do_sample": True, "top_k": 0},
        "beam search of 4": {"do_sample": False, "num_beams": 4, "length_penalty": 0.0},
    }

    def regard() -> list[tuple[int, ...]]:
        if search == "greedy decoding":
            return [one.tokens for one in greedy(ours, **prompt)]
        if search == "sampling":
            return [one.tokens for (one,) in sample(ours, **prompt, seed=0)]
        return [best[0].tokens for best in beam(ours, **prompt, width=4)]

    def generate(**more: Any) -> Tensor:
        ones = torch.ones_like(ids)
        out: Tensor = theirs.generate(
            ids, attention_mask=ones, min_new_tokens=new, max_new_tokens=new, **options[search], **more
        )
        return out

    if search != "sampling":
        written, tokens = generate()[:, n:].tolist(), regard()
        same = sum(a == b for x, y in zip(written, tokens, strict=True) for a, b in zip(x, y, strict=True))
        if same < new * len(ids):
            print(f"note: {same} of {new * len(ids)} tokens are those of generate")
    return {
        "regard": regard,
        "generate": generate,
        "generate, static cache": functools.partial(generate, cache_implementation="static"),
    }


def loaded(theirs: Any, size: Size) -> Any:
    """Our model with the weights of theirs."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load(folder).to(size.device)


def translation(size: Size) -> dict[str, Call]:
    """Greedy search from sources on the device and prefixes as lists."""
    config = library().MarianConfig(
        vocab_size=size.of(32_000, 100),
        d_model=size.of(512, 32),
        encoder_layers=size.of(6, 1),
        decoder_layers=size.of(6, 1),
        encoder_attention_heads=size.of(8, 2),
        decoder_attention_heads=size.of(8, 2),
        encoder_ffn_dim=size.of(2048, 64),
        decoder_ffn_dim=size.of(2048, 64),
        bos_token_id=None,
        eos_token_id=1,
        forced_eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=0,
        activation_function="swish",
        scale_embedding=True,
    )
    theirs = built("MarianMTModel", config, size._replace(dtype=torch.float32))
    ours, rows, new = loaded(theirs, size), size.of(16, 2), size.of(64, 4)
    ids = torch.randint(3, 90, (rows, size.of(64, 8)), device=size.device)

    def regard() -> object:
        return greedy(ours, {"source": ids}, [[0]] * rows, end=None, max_length=new)

    def generate() -> object:
        ones = torch.ones_like(ids)
        return theirs.generate(
            ids, attention_mask=ones, do_sample=False, num_beams=1, min_new_tokens=new, max_new_tokens=new
        )

    return {"regard": regard, "generate": generate}


def training(size: Size) -> dict[str, Call]:
    """One update of a language model, as written and compiled, ours and that of transformers."""
    n, b, dim, depth = size.of(1024, 16), size.of(16, 2), size.of(768, 32), size.of(12, 1)
    heads, words = size.of(12, 2), size.of(50_304, 100)
    torch.manual_seed(0)
    config = GptConfig(
        vocabulary=words, length=n, dim=dim, depth=depth, heads=heads, dropout=0.0, attention_dropout=0.0
    )
    ours = Gpt(config).to(size.device)
    shape = {"n_embd": dim, "n_layer": depth, "n_head": heads, "n_positions": n, "vocab_size": words}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    theirs = library().GPT2LMHeadModel(library().GPT2Config(**shape, **dropout)).to(size.device)
    ids = torch.randint(words, (b, n), device=size.device)

    def update(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Call:
        optimizer = torch.optim.AdamW(model.parameters(), fused=size.device.type == "cuda")

        def step() -> None:
            with torch.autocast(size.device.type, torch.bfloat16):
                total = loss()
            total.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    our_loss, their_loss = torch.compile(ours.loss), torch.compile(theirs)
    return {
        "regard": update(ours, lambda: ours.loss({"ids": ids}).mean),
        "regard, compiled": update(ours, lambda: our_loss({"ids": ids}).mean),
        "transformers": update(theirs, lambda: theirs(input_ids=ids, labels=ids).loss),
        "transformers, compiled": update(theirs, lambda: their_loss(input_ids=ids, labels=ids).loss),
    }


def compiled_sizes(size: Size) -> dict[str, Call]:
    """A second model of another size under torch.compile in one process, and lengths that change."""

    def run() -> None:
        for dim in (size.of(256, 16), size.of(384, 32)):
            config = GptConfig(
                vocabulary=100, length=512, dim=dim, depth=2, heads=4, dropout=0.0, attention_dropout=0.0
            )
            model = Gpt(config).to(size.device)
            loss = torch.compile(model.loss)
            for n in (64, 96, 80):
                loss({"ids": torch.randint(100, (4, n), device=size.device)}).mean.backward()

    return {"regard": run}
