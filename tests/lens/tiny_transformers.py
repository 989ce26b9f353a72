"""Tiny models of Hugging Face with random weights, built offline, and inputs for them."""

import torch
import transformers as hf

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 61}
SEQ2SEQ = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
SEQ2SEQ |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
SEQ2SEQ |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
SEQ2SEQ |= {"d_model": 24, "vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ |= {"decoder_start_token_id": 1}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert():
    return hf.BertModel(hf.BertConfig(**SMALL, max_position_embeddings=64))


def gpt2():
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **ENDS))


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **ENDS, num_key_value_heads=2, max_position_embeddings=64))


def mistral(window=5):
    sizes = {"num_key_value_heads": 2, "sliding_window": window, "max_position_embeddings": 64}
    return hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **ENDS, **sizes))


def gemma2():
    sizes = {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 4, "attn_logit_softcapping": 2.0}
    config = hf.Gemma2Config(**SMALL, **ENDS, **sizes, query_pre_attn_scalar=9, max_position_embeddings=64)
    config._attn_implementation = "eager"
    return hf.Gemma2ForCausalLM(config)


def gpt_oss():
    sizes = {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 4, "num_local_experts": 2}
    config = hf.GptOssConfig(**SMALL, **ENDS, **sizes, num_experts_per_tok=1, max_position_embeddings=64)
    config._attn_implementation = "eager"
    return hf.GptOssForCausalLM(config)


def t5():
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    more = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **more, **ends))


def marian():
    return hf.MarianMTModel(hf.MarianConfig(**SEQ2SEQ, max_position_embeddings=64, forced_eos_token_id=None))


def whisper():
    sizes = {"num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 32}
    config = hf.WhisperConfig(**SEQ2SEQ, **sizes, suppress_tokens=[], begin_suppress_tokens=[])
    return hf.WhisperForConditionalGeneration(config)


def vit():
    return hf.ViTModel(
        hf.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=20, patch_size=5)
    )


def made(build, implementation="sdpa", scale=4.0):
    """A model in evaluation with weights large enough for attention to be uneven."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(scale)
    model.set_attn_implementation(implementation)
    return model


def ids(b=2, n=9, low=3):
    return torch.randint(low, 61, (b, n), generator=torch.Generator().manual_seed(1))


def padding(side, b=2, n=9, real=6):
    """1 for tokens, the last batch row `real` long and padded on one side."""
    mask = torch.ones(b, n, dtype=torch.long)
    mask[-1, real:] = 0
    return mask if side == "right" else mask.flip(1)
