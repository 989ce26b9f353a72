"""Architectures of transformers, all that one rule makes small: a tape shows what each says it attends to."""

import inspect
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from regard.lens import capture

CLOSE = 2e-4  # scores are large, and kernels sum in another order
SIZES = {
    32: "hidden_size d_model n_embd embed_dim dim embedding_size text_embed_dim moe_intermediate_size image_size "
    "shared_expert_intermediate_size max_source_positions max_target_positions",
    64: "intermediate_size hidden_dim ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff mlp_dim max_position_embeddings "
    "n_positions",
    16: "projection_dim kv_lora_rank q_lora_rank num_mel_bins",
    8: "head_dim d_kv patch_size qk_rope_head_dim qk_nope_head_dim v_head_dim",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts rotary_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth num_key_value_heads num_kv_heads num_experts_per_tok moe_k type_vocab_size eos_token_id",
    99: "vocab_size",
    3: "num_channels",
    1: "bos_token_id decoder_start_token_id",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
NAMES = """
afmoe aimv2_vision_model albert apertus arcee aria aria_text audioflamingo3 axk2 aya_vision bart beam beit bert
bert-generation bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert canine
chinese_clip_vision_model clip_text_model clip_vision_model codegen cohere cohere2 cohere2_moe cohere2_vision convbert
cosmos3_omni ctrl cwm data2vec-audio data2vec-text data2vec-vision deberta deberta-v2 deepseek_v3 deepseek_v32
deepseek_v4 deepseek_vl deepseek_vl_hybrid deit diffllama dinov2 dinov2_with_registers dinov3_vit distilbert doge dpr
dpt electra embedding_gemma2 embedding_gemma2_text ernie ernie4_5 ernie4_5_moe eurobert exaone4 exaone4_5 exaone_moe
falcon flex_olmo flint fsmt fuyu gemma gemma2 gemma3 gemma3_text gemma4_unified gemma4_unified_text git glm glm4
glm4_moe glm4_moe_lite glm_moe_dsa glmasr glpn got_ocr2 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj
granite granite_speech granite_speech_plus granitemoe granitemoeshared gte helium higgs_audio_v2 hrm_text hubert hy_v3
hy_v4 hyperclovax hyperclovax_vision_v2 ibert idefics2 idefics3 idefics3_vision ijepa imagegpt inkling_mm_model
inkling_text internvl jais2 jetmoe jina_embeddings_v3 kimi_k25 kolibri1 kosmos-2.5 laguna layoutlm lfm2 lfm2_vl
lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision m2m_100 marian markuplm mbart
megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral3 mistral mistral3
mistral_large4 mistral_large4_text mixtral mlcd mlcd_vision_model mllama mobilebert modernbert modernbert-decoder
modernvbert molmo2_text moonshine moshi moss_transcribe_diarize mpnet mpt mt5 muse_glimmer_text muse_spark_text
musicflamingo mvp nanochat nllb-moe nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt
openai_privacy_filter opt ovis2 pegasus persimmon phi phi3 phi4_multimodal phimoe pixio pixtral plbart pvt qianfan_ocr
qwen2 qwen2_audio qwen2_moe qwen3 qwen3_asr qwen3_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text
qwen3_vl_text radio rembert roberta roberta-prelayernorm roc_bert roformer sam3_vision_model sam3_vit_model sapiens2
seed_oss segformer sew sew-d siglip_vision_model smollm3 smolvlm smolvlm_vision solar_open splinter stablelm
starcoder2 switch_transformers t5 t5gemma tapas tipsv2_text_model tipsv2_vision_model ultrabert ultravbert umt5
unispeech unispeech-sat vaultgemma video_llama_3 video_llava vipllava visual_bert vit vit_msn vitdet voxtral wav2vec2
wav2vec2-conformer xglm xlm-roberta xlm-roberta-xl xlnet youtu
""".split()  # noqa: SIM905


def small(kind):
    """The configuration of a model, and of its parts, with all sizes that have one of these names."""
    given = {}
    for name, value in vars(kind()).items():
        if hasattr(value, "to_dict"):
            given[name] = small(type(value))
        elif name in SMALL and type(value) is int:
            given[name] = SMALL[name]
        elif name in ("depths", "num_blocks", "layers") and isinstance(value, (list, tuple)):
            given[name] = [1] * len(value)
    if "layer_types" in vars(kind()):
        given["layer_types"] = None
    if "kv_lora_rank" in given:  # keys are made of latents, one for each head
        given["num_key_value_heads"] = SMALL["num_attention_heads"]
    return kind(**given)


def made(config, implementation):
    """A model in evaluation with weights large enough for attention to be uneven."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim > 1 and x.is_floating_point():
                x.mul_(4.0)
    return model


def inputs(model, config):
    """Texts, pictures or sounds, whatever its first arguments are."""
    known = inspect.signature(model.forward).parameters
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, 9), generator=numbers)
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    if "input_ids" not in known:
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        given["pixel_values"] = torch.randn(2, 3, size, size, generator=numbers)
        given["input_values"] = torch.randn(2, 4000, generator=numbers)
    return {name: x for name, x in given.items() if name in known}


def fused(config):
    """The same by PyTorch's kernel, where the model has it."""
    try:
        return made(config, "sdpa")
    except ValueError:
        return made(config, "eager")


@pytest.mark.parametrize("name", NAMES)
def test_a_tape_holds_what_the_model_says_it_attends_to(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")  # transformers have some of their own
        config = small(CONFIG_MAPPING[name])
        eager = made(config, "eager")
        given = inputs(eager, config)
        out = eager(**given, output_attentions=True)
        said = [A for key, each in out.items() if "attentions" in key for A in each or () if A is not None]
        assert said
        for model in (eager, fused(config)):
            plain = model(**given)
            with capture(model) as tape:
                out = model(**given)
            assert torch.equal(plain[0], out[0])
            shown = [A.dense() for A in tape.values()]
            for A in said:
                assert any(A.shape == B.shape and torch.allclose(A, B, atol=CLOSE) for B in shown)
    assert not [x for x in told if "tape" in str(x.message)]
