"""Libraries for text, speech and proteins."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import Case


def ids(b: int = 2, n: int = 11, classes: int = 50) -> tuple[torch.Tensor]:
    return (torch.randint(1, classes, (b, n)),)


def words(b: int = 2, n: int = 9, dim: int = 32) -> torch.Tensor:
    return torch.randn(b, n, dim)


def transformer_lens() -> Iterator[Case]:
    from transformer_lens import HookedEncoder, HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 16, "d_head": 8, "n_heads": 4, "d_vocab": 50, "act_fn": "gelu"}
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 8},
        "shortformer": {"positional_embedding_type": "shortformer"},
        "alibi": {"positional_embedding_type": "alibi"},
        "grouped keys": {"n_key_value_heads": 2},
        "bidirectional": {"attention_dir": "bidirectional"},
        "attention only": {"attn_only": True},
        "local": {"use_local_attn": True, "window_size": 4, "attn_types": ["global", "local"]},
        "soft cap": {"attn_scores_soft_cap": 20.0},
        "gated MLP": {"gated_mlp": True},
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "parallel": {"parallel_attn_mlp": True},
        "qk-norm": {"use_qk_norm": True, "normalization_type": "RMS"},
        "attn result": {"use_attn_result": True},
        "split qkv": {"use_split_qkv_input": True},
    }
    for name, given in options.items():
        yield Case(
            name=f"HookedTransformer, {name}",
            build=lambda given=given: HookedTransformer(HookedTransformerConfig(**sizes | given)),
            inputs=ids,
        )
    yield Case(
        name="HookedTransformer, run_with_cache",
        build=lambda: HookedTransformer(HookedTransformerConfig(**sizes)),
        inputs=ids,
        call=lambda model, x: model.run_with_cache(x)[0],
    )
    yield Case(
        name="HookedEncoder",
        build=lambda: HookedEncoder(HookedTransformerConfig(**sizes | {"attention_dir": "bidirectional"})),
        inputs=ids,
    )


def fair_esm() -> Iterator[Case]:
    from esm import Alphabet
    from esm.model.esm1 import ProteinBertModel
    from esm.model.esm2 import ESM2
    from esm.model.msa_transformer import MSATransformer
    from esm.multihead_attention import MultiheadAttention

    esm2 = partial(ESM2, num_layers=2, embed_dim=32, attention_heads=4)
    padded = torch.tensor([[0, 5, 6, 7, 8, 9, 2], [0, 5, 9, 2, 1, 1, 1]])
    yield Case(name="ESM2", build=esm2, inputs=lambda: ids(2, 9, 24))
    yield Case(name="ESM2, padded", build=esm2, inputs=lambda: (padded,), batched=False)
    yield Case(
        name="ESM2, contacts",
        build=esm2,
        inputs=lambda: (padded,),
        call=lambda model, x: model(x, return_contacts=True),
        batched=False,
    )
    one = argparse.Namespace(
        arch="roberta_large",
        layers=2,
        embed_dim=32,
        logit_bias=True,
        ffn_embed_dim=32,
        attention_heads=4,
        max_positions=32,
        emb_layer_norm_before=True,
        token_dropout=False,
        final_bias=True,
    )
    yield Case(
        name="ESM1b",
        build=lambda: ProteinBertModel(one, Alphabet.from_architecture("roberta_large")),
        inputs=lambda: ids(2, 9, 24),
    )
    msa = argparse.Namespace(
        arch="msa_transformer",
        layers=2,
        embed_dim=32,
        logit_bias=True,
        ffn_embed_dim=32,
        attention_heads=4,
        max_positions=32,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_tokens_per_msa=2**14,
        embed_positions_msa=True,
        embed_positions_msa_dim=32,
        max_tokens=2**14,
    )
    yield Case(
        name="MSATransformer",
        build=lambda: MSATransformer(msa, Alphabet.from_architecture("msa_transformer")),
        inputs=lambda: (torch.randint(4, 24, (2, 3, 9)),),
        batched=False,
    )
    yield Case(
        name="MultiheadAttention",
        build=partial(MultiheadAttention, 32, 4),
        inputs=lambda: (words(9, 2), words(7, 2)),
        call=lambda model, q, k: model(q, k, k, need_weights=False)[0],
        batched=False,
    )


def whisper() -> Iterator[Case]:
    from whisper.model import ModelDimensions, MultiHeadAttention, Whisper

    dims = ModelDimensions(
        n_mels=8,
        n_audio_ctx=15,
        n_audio_state=32,
        n_audio_head=4,
        n_audio_layer=2,
        n_vocab=50,
        n_text_ctx=16,
        n_text_state=32,
        n_text_head=4,
        n_text_layer=2,
    )
    sound = lambda: (torch.randn(2, 8, 30), *ids(2, 7))  # noqa: E731
    for fused in (True, False):

        def build(fused: bool = fused) -> nn.Module:
            MultiHeadAttention.use_sdpa = fused
            model = Whisper(dims)
            nn.init.normal_(model.decoder.positional_embedding)  # the library leaves it empty
            return model

        yield Case(name=f"Whisper{', without SDPA' * (not fused)}", build=build, inputs=sound)
    yield Case(
        name="Whisper, cache by hooks",
        build=build,
        inputs=sound,
        call=whisper_steps,
    )


def whisper_steps(model: Any, mel: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    audio = model.encoder(mel)
    cache, hooks = model.install_kv_cache_hooks()
    first = model.decoder(tokens[:, :4], audio, kv_cache=cache)
    for n in range(4, tokens.shape[1]):
        first = model.decoder(tokens[:, n : n + 1], audio, kv_cache=cache)
    for hook in hooks:
        hook.remove()
    return first


def litgpt() -> Iterator[Case]:
    from litgpt import GPT, Config

    sizes = {"block_size": 16, "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "padded_vocab_size": 50}
    for name, given in {
        "plain": {},
        "grouped keys": {"n_query_groups": 2},
        "one key head": {"n_query_groups": 1},
        "Llama": {
            "norm_class_name": "RMSNorm",
            "mlp_class_name": "LLaMAMLP",
            "intermediate_size": 32,
            "bias": False,
            "rotary_percentage": 1.0,
            "parallel_residual": False,
        },
        "soft cap": {"attention_logit_softcapping": 20.0},
        "window": {"sliding_window_size": 4, "sliding_window_indices": [1, 0]},
        "qk-norm": {"norm_qk": True},
    }.items():
        yield Case(
            name=f"GPT, {name}", build=lambda given=given: GPT(Config(**sizes | given)), inputs=lambda: ids(2, 9)
        )
    yield Case(name="GPT, cache", build=lambda: GPT(Config(**sizes)), inputs=lambda: ids(1, 9), call=litgpt_steps)


def litgpt_steps(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.set_kv_cache(batch_size=len(x))
    out = model(x[:, :5], torch.arange(5))
    for n in range(5, x.shape[1]):
        out = model(x[:, n : n + 1], torch.tensor([n]))
    return out


def peft() -> Iterator[Case]:
    from peft import (
        AdaptionPromptConfig,
        IA3Config,
        LoHaConfig,
        LoraConfig,
        PrefixTuningConfig,
        PromptEncoderConfig,
        PromptTuningConfig,
        get_peft_model,
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
    two = ["q_proj", "v_proj"]
    for name, config in {
        "LoRA": LoraConfig(r=4, target_modules=two, task_type="CAUSAL_LM", init_lora_weights=False),
        "DoRA": LoraConfig(r=4, target_modules=two, task_type="CAUSAL_LM", use_dora=True),
        "LoHa": LoHaConfig(r=4, target_modules=two, init_weights=False),
        "IA3": IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        "prefix": PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "p-tuning": PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, task_type="CAUSAL_LM"),
        "LLaMA-adapter": AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM"),
    }.items():
        yield Case(
            name=name,
            build=lambda config=config: get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), config),
            inputs=lambda: {"input_ids": ids(2, 9)[0]},
        )


def sentence_transformers() -> Iterator[Case]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling
    from transformers import BertConfig, BertModel

    class Body(nn.Module):
        """A random BERT where the library puts its transformer."""

        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            self.auto_model = BertModel(BertConfig(**sizes, vocab_size=50))

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return features | {"token_embeddings": self.auto_model(**features).last_hidden_state}

    mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    yield Case(
        name="BERT and pooling",
        build=lambda: SentenceTransformer(modules=[Body(), Pooling(32)], device="cpu"),
        inputs=lambda: ids(2, 9),
        call=lambda model, x: model({"input_ids": x, "attention_mask": mask})["sentence_embedding"],
    )


def pretrained_bert() -> Iterator[Case]:
    from pytorch_pretrained_bert import BertConfig, BertModel, GPT2Config, GPT2Model, OpenAIGPTConfig, OpenAIGPTModel

    yield Case(
        name="BERT",
        build=lambda: BertModel(BertConfig(50, 32, 2, 4, 32)),
        inputs=lambda: ids(2, 9),
    )
    gpt = {"n_positions": 16, "n_ctx": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    yield Case(name="GPT-2", build=lambda: GPT2Model(GPT2Config(50, **gpt)), inputs=lambda: ids(2, 9))
    yield Case(name="GPT", build=lambda: OpenAIGPTModel(OpenAIGPTConfig(50, **gpt)), inputs=lambda: ids(2, 16))


def pytorch_transformers() -> Iterator[Case]:
    from pytorch_transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2Model,
        RobertaConfig,
        RobertaModel,
        TransfoXLConfig,
        TransfoXLModel,
        XLMConfig,
        XLMModel,
        XLNetConfig,
        XLNetModel,
    )

    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    yield Case(name="BERT", build=lambda: BertModel(BertConfig(50, **bert)), inputs=lambda: ids(2, 9))
    yield Case(
        name="RoBERTa",
        build=lambda: RobertaModel(RobertaConfig(50, **bert, max_position_embeddings=32)),
        inputs=lambda: ids(2, 9),
    )
    yield Case(
        name="XLNet",
        build=lambda: XLNetModel(XLNetConfig(50, d_model=32, n_layer=2, n_head=4, d_inner=32)),
        inputs=lambda: ids(2, 9),
    )
    yield Case(
        name="XLM",
        build=lambda: XLMModel(XLMConfig(50, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=32)),
        inputs=lambda: ids(2, 9),
    )
    yield Case(
        name="GPT-2",
        build=lambda: GPT2Model(GPT2Config(50, n_positions=16, n_ctx=16, n_embd=32, n_layer=2, n_head=4)),
        inputs=lambda: ids(2, 9),
    )
    yield Case(
        name="Transformer-XL",
        build=lambda: TransfoXLModel(
            TransfoXLConfig(
                50,
                cutoffs=[20, 30],
                d_model=32,
                d_embed=32,
                n_head=4,
                d_head=8,
                d_inner=32,
                n_layer=2,
                tgt_len=9,
                mem_len=9,
                adaptive=False,
            )
        ),
        inputs=lambda: ids(2, 9),
    )


def bert_pytorch() -> Iterator[Case]:
    from bert_pytorch.model import BERT

    yield Case(
        name="BERT",
        build=partial(BERT, 50, hidden=32, n_layers=2, attn_heads=4),
        inputs=lambda: (*ids(2, 9), torch.ones(2, 9, dtype=torch.long)),
    )


def curated() -> Iterator[Case]:
    from curated_transformers.layers import AttentionHeads, AttentionMask, QkvMode, SelfAttention

    for fused in (True, False):
        yield Case(
            name=f"SelfAttention{', without SDPA' * (not fused)}",
            build=lambda: self_attention(SelfAttention, AttentionHeads, QkvMode),
            inputs=lambda: (words(),),
            call=lambda model, x, fused=fused: curated_call(
                model, x, AttentionMask(torch.arange(9) < torch.tensor([[9], [6]])), fused
            ),
        )


def self_attention(kind: Any, heads: Any, mode: Any) -> nn.Module:
    from curated_transformers.layers import ScaledDotProductAttention
    from curated_transformers.layers.attention import QkvSplitGroupedByHead

    return kind(
        attention_heads=heads.uniform(4, QkvSplitGroupedByHead()),
        attention_scorer=ScaledDotProductAttention(dropout_prob=0.0, linear_biases=None),
        hidden_width=32,
        qkv_mode=mode.SEPARATE,
        rotary_embeds=None,
        use_bias=True,
    )


def curated_call(model: nn.Module, x: torch.Tensor, mask: Any, fused: bool) -> object:
    from curated_transformers.layers import enable_torch_sdp

    with enable_torch_sdp(fused):
        return model(x, mask)[0]


def joeynmt() -> Iterator[Case]:
    from joeynmt.attention import BahdanauAttention, LuongAttention
    from joeynmt.decoders import RecurrentDecoder, TransformerDecoder
    from joeynmt.encoders import TransformerEncoder
    from joeynmt.transformer_layers import MultiHeadedAttention

    yield Case(
        name="MultiHeadedAttention",
        build=partial(MultiHeadedAttention, 4, 32),
        inputs=lambda: (words(2, 9), words(2, 7)),
        call=lambda model, q, k: model(k, k, q)[0],
    )
    yield Case(
        name="MultiHeadedAttention, weights returned",
        build=partial(MultiHeadedAttention, 4, 32),
        inputs=lambda: (words(2, 9), words(2, 7)),
        call=lambda model, q, k: model(k, k, q, return_weights=True)[0],
    )
    mask = (torch.arange(9) < torch.tensor([[9], [6]])).unsqueeze(1)
    yield Case(
        name="TransformerEncoder",
        build=partial(
            TransformerEncoder, hidden_size=32, ff_size=32, num_layers=2, num_heads=4, dropout=0.0, emb_dropout=0.0
        ),
        inputs=lambda: (words(2, 9),),
        call=lambda model, x: model(x, torch.tensor([9, 6]), mask)[0],
    )
    yield Case(
        name="TransformerDecoder",
        build=partial(
            TransformerDecoder,
            hidden_size=32,
            ff_size=32,
            num_layers=2,
            num_heads=4,
            dropout=0.0,
            emb_dropout=0.0,
            vocab_size=50,
        ),
        inputs=lambda: (words(2, 7), words(2, 9)),
        call=lambda model, x, memory: model(
            x,
            encoder_output=memory,
            encoder_hidden=None,
            src_mask=mask,
            unroll_steps=None,
            hidden=None,
            trg_mask=torch.ones(2, 1, 7, dtype=torch.bool),
        )[0],
    )
    for name, kind in {"BahdanauAttention": BahdanauAttention, "LuongAttention": LuongAttention}.items():
        sizes = {"hidden_size": 32, "key_size": 32} | ({"query_size": 32} if name[0] == "B" else {})
        yield Case(
            name=name,
            build=partial(kind, **sizes),
            inputs=lambda: (words(2, 3), words(2, 9)),
            call=partial(attention_steps, mask=mask),
        )
    for attention in ("bahdanau", "luong"):
        yield Case(
            name=f"RecurrentDecoder, {attention}",
            build=lambda attention=attention: RecurrentDecoder(
                emb_size=16,
                hidden_size=32,
                vocab_size=50,
                attention=attention,
                init_hidden="zero",
                encoder=argparse.Namespace(output_size=32),
            ),
            inputs=lambda: (words(2, 5, 16), words(2, 9)),
            call=lambda model, x, memory: model(
                x, encoder_output=memory, encoder_hidden=torch.zeros(2, 32), src_mask=mask, unroll_steps=5
            )[0],
        )


def attention_steps(model: Any, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    model.compute_proj_keys(keys)
    out = []
    for n in range(queries.shape[1]):
        query = queries[:, n : n + 1].contiguous()
        if hasattr(model, "compute_proj_query"):
            model.compute_proj_query(query)
        out.append(model(query=query, mask=mask, values=keys)[0])
    return torch.cat(out, 1)


def espnet() -> Iterator[Case]:
    from espnet.nets.pytorch_backend.rnn.attentions import AttAdd, AttDot, AttLoc
    from espnet.nets.pytorch_backend.transformer.attention import (
        MultiHeadedAttention,
        RelPositionMultiHeadedAttention,
    )

    yield Case(
        name="MultiHeadedAttention",
        build=partial(MultiHeadedAttention, 4, 32, 0.0),
        inputs=lambda: (words(2, 9), words(2, 7)),
        call=lambda model, q, k: model(q, k, k, None),
    )
    yield Case(
        name="MultiHeadedAttention, masked",
        build=partial(MultiHeadedAttention, 4, 32, 0.0),
        inputs=lambda: (words(2, 9),),
        call=lambda model, q: model(q, q, q, (torch.arange(9) < torch.tensor([[9], [6]])).unsqueeze(1)),
    )
    yield Case(
        name="RelPositionMultiHeadedAttention",
        build=partial(RelPositionMultiHeadedAttention, 4, 32, 0.0),
        inputs=lambda: (words(2, 9), torch.randn(1, 17, 32)),
        call=lambda model, q, positions: model(q, q, q, positions, None),
    )
    for name, build in {
        "AttDot": partial(AttDot, 32, 32, 16),
        "AttAdd": partial(AttAdd, 32, 32, 16),
        "AttLoc": partial(AttLoc, 32, 32, 16, 4, 2),
    }.items():
        yield Case(name=name, build=build, inputs=lambda: (words(2, 9), words(2, 3)), call=espnet_steps)


def espnet_steps(model: Any, encoded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    model.reset()
    weights, out = None, []
    for n in range(states.shape[1]):
        context, weights = model(encoded, [9, 9], states[:, n], weights)
        out.append(context)
    return torch.stack(out)


def funasr() -> Iterator[Case]:
    from funasr.models.sanm.attention import MultiHeadedAttention, MultiHeadedAttentionSANM

    yield Case(
        name="MultiHeadedAttention",
        build=partial(MultiHeadedAttention, 4, 32, 0.0),
        inputs=lambda: (words(2, 9),),
        call=lambda model, x: model(x, x, x, None),
    )
    yield Case(
        name="MultiHeadedAttentionSANM",
        build=partial(MultiHeadedAttentionSANM, 4, 32, 32, 0.0, 3),
        inputs=lambda: (words(2, 9),),
        call=lambda model, x: model(x, torch.ones(2, 1, 9)),
    )


def pyvene() -> Iterator[Case]:
    from pyvene import IntervenableConfig, IntervenableModel, RepresentationConfig, VanillaIntervention
    from transformers import GPT2Config, GPT2Model

    def build() -> nn.Module:
        gpt = GPT2Model(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4))
        config = IntervenableConfig(
            model_type=type(gpt),
            representations=[RepresentationConfig(0, "block_output", "pos", 1)],
            intervention_types=VanillaIntervention,
        )
        return gpt, IntervenableModel(config, gpt)

    class Around(nn.Module):
        """The library's wrapper as a module."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt, around = build()
            object.__setattr__(self, "around", around)

        def forward(self, base: torch.Tensor, source: torch.Tensor) -> object:
            out = self.around({"input_ids": base}, [{"input_ids": source}], {"sources->base": 3})
            return out[1].last_hidden_state

    yield Case(name="GPT-2, one block replaced", build=Around, inputs=lambda: (*ids(2, 9), *ids(2, 9)))


LIBRARIES = {
    "transformer-lens": transformer_lens,
    "fair-esm": fair_esm,
    "openai-whisper": whisper,
    "litgpt": litgpt,
    "peft": peft,
    "sentence-transformers": sentence_transformers,
    "pytorch-pretrained-bert": pretrained_bert,
    "pytorch-transformers": pytorch_transformers,
    "bert-pytorch": bert_pytorch,
    "curated-transformers": curated,
    "joeynmt": joeynmt,
    "espnet": espnet,
    "funasr": funasr,
    "pyvene": pyvene,
}
