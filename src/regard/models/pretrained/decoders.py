"""GPT-2 and the Llama family: tensor names and config fields of Hugging Face and ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..gpt import Gpt, GptConfig
from ..rope_scaling import DynamicStretch, LinearStretch, RopeScaling, Stretch, YarnStretch, yarn_amplitude
from .architecture import Architecture, ModelHead, TensorLocation, layers
from .fields import ConfigFields

GPT2_LAYER: Mapping[str, str | TensorLocation] = {
    "attention.query": TensorLocation("attn.c_attn", part=0, transposed=True),
    "attention.key": TensorLocation("attn.c_attn", part=1, transposed=True),
    "attention.value": TensorLocation("attn.c_attn", part=2, transposed=True),
    "attention.out": TensorLocation("attn.c_proj", transposed=True),
    "around_attention.norm": "ln_1",
    "feedforward.up": TensorLocation("mlp.c_fc", transposed=True),
    "feedforward.down": TensorLocation("mlp.c_proj", transposed=True),
    "around_feedforward.norm": "ln_2",
}
LLAMA_LAYER = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "around_attention.norm": "input_layernorm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
    "around_feedforward.norm": "post_attention_layernorm",
}
ORIGINAL = "original_max_position_embeddings"
YARN = {"beta_fast": "fast", "beta_slow": "slow", "attention_factor": "amplitude", "truncate": "truncate"}
STRETCH = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}


def _gpt(table: str) -> ModelHead:
    return ModelHead(kind=Gpt, build=lambda config, _: Gpt(config), ties={"lm_head.weight": f"{table}.weight"})


def _read_gpt2(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    fields.must("embd_pdrop", ours["dropout"])
    return {}


def _read_llama(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    """Read rotary positions in the format of transformers 5 or in the one before."""
    place = "rope_parameters" if fields.within("rope_parameters") is not None else "rope_scaling"
    base = fields.number("rope_theta", default=10_000.0)
    rope = dict(fields.within(place) or {})
    base = rope.pop("rope_theta", base)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if (
        kind not in ROPE_FIELDS
        or not ROPE_FIELDS[kind][0] <= rope.keys() <= ROPE_FIELDS[kind][0] | ROPE_FIELDS[kind][1]
    ):
        known = [f"{name!r} with {', '.join(sorted(needed))}" for name, (needed, _) in ROPE_FIELDS.items() if needed]
        raise fields.error(place, f"of rope_type 'default', or {', or '.join(known)}", {"rope_type": kind, **rope})
    with fields.path_in_errors():
        return {"base": base, "stretch": _read_scaling(kind, rope, ours["length"])}


# The fields of each rope_type: those that it needs, and those that it may have.
ROPE_FIELDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset({ORIGINAL})),
    "dynamic": (frozenset({"factor"}), frozenset({ORIGINAL})),
    "yarn": (
        frozenset({"factor"}),
        frozenset({ORIGINAL, *YARN, "mscale", "mscale_all_dim", "finetuned"}),
    ),
    "llama3": (frozenset(STRETCH), frozenset()),
}


def _read_scaling(kind: str, rope: dict[str, Any], length: int) -> RopeScaling | None:
    match kind:
        case "linear":
            return LinearStretch(factor=rope["factor"])
        case "dynamic":  # transformers compares with max_position_embeddings
            return DynamicStretch(factor=rope["factor"], original=length)
        case "yarn":
            given = {YARN[name]: value for name, value in rope.items() if name in YARN and value is not None}
            share, share_of_all = rope.get("mscale"), rope.get("mscale_all_dim")
            if "amplitude" not in given and share and share_of_all:
                factor = rope["factor"]
                given["amplitude"] = yarn_amplitude(factor, share) / yarn_amplitude(factor, share_of_all)
            return YarnStretch(factor=rope["factor"], original=rope.get(ORIGINAL, length), **given)
        case "llama3":
            return Stretch(**{STRETCH[name]: value for name, value in rope.items()})
    return None


def _write_llama(config: GptConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.base, "rope_type": "default"}
    match config.stretch:
        case Stretch() as stretch:
            rope |= {"rope_type": "llama3"} | {theirs: getattr(stretch, ours) for theirs, ours in STRETCH.items()}
        case LinearStretch(factor=factor):
            rope |= {"rope_type": "linear", "factor": factor}
        case DynamicStretch(factor=factor):  # from max_position_embeddings on
            rope |= {"rope_type": "dynamic", "factor": factor}
        case YarnStretch() as yarn:
            rope |= {"rope_type": "yarn", "factor": yarn.factor, ORIGINAL: yarn.original}
            rope |= {theirs: getattr(yarn, ours) for theirs, ours in YARN.items()}
    return {"rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}


def _read_qwen(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    fields.must("layer_types", None, ["full_attention"] * ours["depth"])
    return _read_llama(fields, ours, held)


def _read_biases(fields: ConfigFields, ours: dict[str, Any], held: Collection[str]) -> dict[str, Any]:
    biased = ("qkvo" if fields.flag("attention_bias", default=False) else "") + (
        "f" if fields.flag("mlp_bias", default=False) else ""
    )
    return _read_llama(fields, ours, held) | {"biased": biased}


def _write_biases(config: GptConfig) -> dict[str, Any]:
    return _write_llama(config) | {"attention_bias": "qkvo" in config.biased, "mlp_bias": "f" in config.biased}


GPT2 = Architecture(
    title="GPT2",
    config=GptConfig,
    prefix="transformer",
    root="",
    fields={
        "vocab_size": "vocabulary",
        "n_positions": "length",
        "n_embd": "dim",
        "n_layer": "depth",
        "n_head": "heads",
        "n_inner": "hidden",
        "activation_function": ("activation", "gelu_new"),
        "layer_norm_epsilon": ("eps", 1e-5),
        "tie_word_embeddings": ("tied", True),
        "resid_pdrop": ("dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
    },
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False, True),  # an order of rounding
    },
    silent=(
        "n_ctx",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    read=_read_gpt2,
    write=lambda config: {"embd_pdrop": config.dropout, "bos_token_id": None, "eos_token_id": None},
    names={
        "tokens.table": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        **layers("blocks.{n}", "transformer.h.{n}", GPT2_LAYER),
    },
    heads={"LMHeadModel": _gpt("transformer.wte"), "Model": _gpt("transformer.wte")},
)
LLAMA = Architecture(
    title="Llama",
    config=GptConfig,
    prefix="model",
    root="",
    fields={
        "vocab_size": "vocabulary",
        "max_position_embeddings": "length",
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "hidden",
        "hidden_act": ("activation", "silu"),
        "rms_norm_eps": ("eps", 1e-6),
        "tie_word_embeddings": ("tied", False),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    given={"positions": "rotary", "norm": "rms", "gated": True, "dropout": 0.0},
    silent=("pretraining_tp",),
    alone=("dropout",),
    read=_read_biases,
    write=_write_biases,
    names={
        "tokens.table": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        **layers("blocks.{n}", "model.layers.{n}", LLAMA_LAYER),
    },
    heads={"ForCausalLM": _gpt("model.embed_tokens")},
)
HELIUM = replace(LLAMA, title="Helium", given={**LLAMA.given, "rotary_layout": "interleaved"})
MISTRAL = replace(
    LLAMA,
    title="Mistral",
    fields={**LLAMA.fields, "sliding_window": "window"},
    given={**LLAMA.given, "biased": ""},
    read=_read_llama,
    write=_write_llama,
)
QWEN2 = replace(
    LLAMA,
    title="Qwen2",
    fields={theirs: ours for theirs, ours in LLAMA.fields.items() if theirs != "head_dim"},
    given={**LLAMA.given, "biased": "qkv"},
    fixed={"use_sliding_window": (False,)},
    silent=("sliding_window", "max_window_layers"),
    read=_read_qwen,
    write=_write_llama,
)
QWEN3 = replace(
    LLAMA,
    title="Qwen3",
    given={**LLAMA.given, "qk_norm": True},
    fixed={"use_sliding_window": (False,), "mlp_bias": (False,)},
    silent=("sliding_window", "max_window_layers"),
    read=lambda fields, ours, held: _read_qwen(fields, ours, held) | _read_biases(fields, ours, held),
    write=_write_biases,
)
