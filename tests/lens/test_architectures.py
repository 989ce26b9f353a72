"""Architectures of transformers, all that one rule makes small: a tape holds each layer's weights, in order.

They are compared with the model's own `output_attentions`, and an audit finds no other layer that attends. Twenty
architectures are in the core, the others in the group `libraries`.
"""

import inspect
import re
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from regard.lens import CaptureWarning, capture

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


# One of each family, and those whose own order or number of layers is special.
SAMPLE = """
albert bart bert bigbird_pegasus bloom canine clip_vision_model convbert deberta-v2 diffllama falcon gemma2 gpt2 gpt_oss
hrm_text llama segformer siglip_vision_model t5 xlnet
""".split()  # noqa: SIM905
# Entries of a tape that the model computes and leaves out of `output_attentions`, by the name of the layer.
UNREPORTED = {
    "aimv2_vision_model": {"head": "the pooling head attends to the patches"},
    "siglip_vision_model": {"head.attention": "the pooling head attends to the patches"},
    "convbert": {
        "encoder.layer.#.attention.self": "call 0 is a dynamic convolution: weights over the 9 taps of a window"
    },
}
# Models that report one list over several modules, in the order of the calls, not one list a module.
SEVERAL_MODULES = {
    "canine": "two encoders of characters with the encoder of molecules between them",
    "hrm_text": "two modules that call each other's output again and again",
}
# Models whose layers call attention several times with the same weights, which they report once.
CALLS_A_LAYER = {"diffllama": 2}  # one call for each half of the values
# Kinds of layers that mix positions without attention weights, by their classes.
NO_ATTENTION = {"convolution", "pooling", "norm", "recurrence", "delta rule", "state space", "gated convolution"}
# Layers that an audit finds to mix positions, and that are no attention either.
MIXING = {
    "beit": {"pooler": "the mean of the patches"},
    "jetmoe": {
        "layers.#.mlp.router": "tokens are sorted by expert",
        "layers.#.self_attention.experts.router": "tokens are sorted by expert",
    },
    "radio": {"embeddings": "pixels are joined to patches"},
}


def stem(layer):
    """A layer's name with its numbers left out."""
    return re.sub(r"\d+", "#", layer)


def numbers(layer):
    return [int(number) for number in re.findall(r"\d+", layer)]


def by_stem(entries):
    """(layer, call, weights) of a tape by what layers are called, in the tape's order."""
    found = {}
    for layer, call, A in entries:
        found.setdefault(stem(layer), []).append((layer, call, A))
    return found


def differences(name, reported, entries):
    """What is wrong with (layer, call, weights) of a tape, given the lists of weights that the model reports.

    Each list must be the entries of one kind of layer, `encoder.layer.#.attention`: as many, in order, from the first
    layer to the last. No kind may be left over.
    """
    left_out = UNREPORTED.get(name, {})
    entries = [
        (layer, call, A)
        for layer, call, A in entries
        if stem(layer) not in left_out or (name == "convbert" and call == 1)  # each layer's call 1 is its attention
    ]
    kinds = {"all": entries} if name in SEVERAL_MODULES else by_stem(entries)
    wrong = []
    for key, matrices in reported.items():
        expected = [A for A in matrices for _ in range(CALLS_A_LAYER.get(name, 1))]
        distances = {kind: mismatches(expected, kinds[kind]) for kind in kinds}
        nearest = min(distances, key=lambda kind: len(distances[kind]), default=None)
        if nearest is None:
            wrong.append(f"{key}: no entries are left")
            continue
        wrong += [f"{key}: {each}" for each in distances[nearest]]
        layers = [numbers(layer) for layer, _, _ in kinds.pop(nearest)]
        if layers != sorted(layers) and name not in SEVERAL_MODULES:
            wrong.append(f"{key}: the layers {layers} are not in order")
    return wrong + [f"{layer} call {call}: not reported" for entries in kinds.values() for layer, call, _ in entries]


def mismatches(expected, entries):
    """One line for each layer whose weights are not the expected ones, and each entry missing or too many."""
    wrong = [
        f"{layer} call {call} is not entry {n}"
        for n, (A, (layer, call, B)) in enumerate(zip(expected, entries, strict=False))
        if A.shape != B.shape or not torch.allclose(A, B, atol=CLOSE)
    ]
    wrong += [f"entry {n} is missing" for n in range(len(entries), len(expected))]
    return wrong + [f"{layer} call {call} is too many" for layer, call, _ in entries[len(expected) :]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.libraries) for name in NAMES]
)
def test_a_tape_holds_each_layer_in_order_as_the_model_reports_it(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    with warnings.catch_warnings(record=True) as raised, torch.no_grad():
        warnings.simplefilter("always")  # transformers have some of their own
        config = small(CONFIG_MAPPING[name])
        eager = made(config, "eager")
        given = inputs(eager, config)
        out = eager(**given, output_attentions=True)
        lists = {key: [A for A in each or () if A is not None] for key, each in out.items() if "attentions" in key}
        reported = {key: matrices for key, matrices in lists.items() if matrices}
        assert reported
        for model, audit in ((eager, False), (fused(config), True)):
            plain = model(**given)
            with capture(model, audit=audit) as tape:
                out = model(**given)
            assert torch.equal(plain[0], out[0])
            assert differences(name, reported, [(*key, A.dense()) for key, A in tape.items()]) == []
            assert [each for each in tape.unseen if not is_explained(name, each)] == []
    others = [str(x.message) for x in raised if x.category is CaptureWarning and "tape.unseen" not in str(x.message)]
    assert others == []


def is_explained(name, unseen):
    """Whether a layer that an audit names is no attention, or is in the list of exceptions."""
    return unseen.kind in NO_ATTENTION or stem(unseen.layer) in MIXING.get(name, {})


def test_the_sample_and_the_exceptions_are_in_the_list():
    assert len(SAMPLE) == len(set(SAMPLE)) == 20
    assert {*SAMPLE, *UNREPORTED, *SEVERAL_MODULES, *CALLS_A_LAYER, *MIXING} <= set(NAMES)


TWO = [("layer.0.self", 0, torch.eye(3)), ("layer.1.self", 0, torch.ones(3, 3) / 3)]
A, B, C = torch.eye(3), torch.ones(3, 3) / 3, torch.eye(3).flip(0)


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        (TWO, []),
        (
            [("layer.0.self", 0, B), ("layer.1.self", 0, A)],
            ["a: layer.0.self call 0 is not entry 0", "a: layer.1.self call 0 is not entry 1"],
        ),
        ([("layer.0.self", 0, A), ("layer.1.self", 0, C)], ["a: layer.1.self call 0 is not entry 1"]),
        ([("layer.0.self", 0, A)], ["a: entry 1 is missing"]),
        (
            [*TWO, ("layer.1.self", 1, B)],
            ["a: layer.1.self call 1 is too many"],
        ),
        ([*TWO, ("head", 0, B)], ["head call 0: not reported"]),
        ([("layer.1.self", 0, A), ("layer.0.self", 0, B)], ["a: the layers [[1], [0]] are not in order"]),
        (
            [("layer.0.self", 0, A), ("layer.1.other", 0, B)],
            ["a: entry 1 is missing", "layer.1.other call 0: not reported"],
        ),
        ([], ["a: no entries are left"]),
    ],
)
def test_a_wrong_layer_a_wrong_order_and_an_entry_too_many_are_found(entries, wrong):
    assert differences("bert", {"a": [A, B]}, entries) == wrong
