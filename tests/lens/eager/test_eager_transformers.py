"""Models of Hugging Face that write their attention out, against the weights they return themselves."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

import tests.lens.tiny_transformers as zoo
from regard import Causal, Padding
from regard.lens import capture
from regard.ops.terms.biases import Added, Relative

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # DeBERTa scripts its functions

NAMES = zoo.ENDS | {"vocab_size": 61}
BERT = zoo.SMALL | {"max_position_embeddings": 64, "pad_token_id": 0}
GPT = NAMES | {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
LOCAL = {"local_radius": 2, "encoder_attention_type": "local"}
SPEECH = {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [8, 4], "num_conv_pos_embeddings": 16}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
KINDS = ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions")
VIDEO = {key: x for key, x in zoo.SMALL.items() if key != "vocab_size"} | {"num_frames": 2}


def text(side="right"):
    return {"input_ids": zoo.ids(), "attention_mask": zoo.padding(side)}


def left():
    return text("left")


def image():
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def frames():
    return {"pixel_values": torch.randn(2, 2, 3, 16, 16)}


def sound():
    return {"input_values": torch.randn(2, 400)}


def both():
    return text() | {"decoder_input_ids": zoo.ids(n=5)}


MODELS = {
    "Bloom": ("BloomForCausalLM", NAMES | {"hidden_size": 24, "n_layer": 2, "n_head": 4}, left),
    "GPTJ": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}, left),
    "OpenAIGPT": ("OpenAIGPTLMHeadModel", GPT, text),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        NAMES | {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        left,
    ),
    "XGLM": ("XGLMForCausalLM", NAMES | {"d_model": 24, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32}, left),
    "DebertaV2": ("DebertaV2Model", BERT | RELATIVE | {"position_buckets": 8}, text),
    "SEWD": ("SEWDModel", BERT | SPEECH | RELATIVE | {"num_conv_pos_embedding_groups": 2}, sound),
    "MPNet": ("MPNetModel", BERT, text),
    "SqueezeBert": ("SqueezeBertModel", BERT | {"embedding_size": 24}, text),
    "XLNet": ("XLNetModel", NAMES | {"d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 32}, text),
    "Swinv2": ("Swinv2Model", SWIN, image),
    "Timesformer": ("TimesformerModel", VIDEO | {"image_size": 16, "patch_size": 8}, frames),
    "BlipText": ("BlipTextModel", BERT | {"is_decoder": False}, text),
    "Mvp": ("MvpForConditionalGeneration", zoo.SEQ2SEQ | {"max_position_embeddings": 64}, both),
}


def made(name):
    kind, sizes, inputs = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, kind)(getattr(hf, f"{name}Config")(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.std() < 0.1:
                parameter.mul_(5)
    return model, inputs()


def own_weights(out):
    """What a model says it attends to, layer by layer; SqueezeBert returns its scores."""
    found = [A for kind in KINDS for A in getattr(out, kind, None) or ()]
    return [A if A.min() >= 0 else A.softmax(-1) for A in found]


def off(told, truth):
    """How far the weights are off; rows that see nothing are zeros on a tape."""
    return ((told[:] - truth).abs() * (told[:].sum(-1, keepdim=True) > 0)).max()


@pytest.mark.parametrize("name", MODELS)
def test_a_tape_holds_what_the_model_returns(name):
    model, inputs = made(name)
    with torch.no_grad():
        plain = model(**inputs, output_attentions=True)
        with capture(model) as tape:
            out = model(**inputs, output_attentions=True)
    assert torch.equal(plain[0], out[0])
    expected = own_weights(out)
    assert expected
    for truth in expected:
        assert min(off(tape[key], truth) for key in tape if tape[key].shape == truth.shape) < 1e-5
    assert not any(torch.equal(tape[key].call.q, torch.zeros_like(tape[key].call.q)) for key in tape)


def test_terms_are_the_plainest():
    told = {}
    for name in ("Bloom", "OpenAIGPT", "XGLM", "MPNet"):
        model, inputs = made(name)
        with torch.no_grad(), capture(model) as tape:
            model(**inputs)
        told[name] = tape[next(iter(tape))].call
    causal = Causal() & Padding(zoo.padding("left").bool())
    assert repr(told["Bloom"].mask) == repr(told["XGLM"].mask) == repr(causal)
    assert isinstance(told["Bloom"].bias, Added)
    assert told["Bloom"].bias.tensors()[0].shape == (2, 4, 1, 9)
    assert told["OpenAIGPT"].mask == Causal() & Padding((9, 6))
    assert told["OpenAIGPT"].bias is None
    assert told["XGLM"].bias is None
    assert isinstance(told["MPNet"].bias, Relative)


def test_blocks_of_a_text_are_a_batch():
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 61}
    model = hf.LongT5EncoderModel(hf.LongT5Config(**sizes, **LOCAL)).eval()
    with torch.no_grad(), capture(model) as tape:
        out = model(input_ids=zoo.ids(), output_attentions=True)
    (truth,) = out.attentions  # b blocks h i j
    (name,) = tape
    assert off(tape[name], truth.flatten(0, 1)) < 1e-5


@pytest.mark.parametrize("name", ["Bloom", "GPTJ", "XGLM", "Mvp"])
def test_new_tokens_are_rows_of_the_same_matrix(name):
    model, inputs = made(name)
    inputs = {key: x for key, x in inputs.items() if not key.startswith("decoder")}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    with capture(model, layers="*[Dd]ecoder*" if name == "Mvp" else None) as tape:
        made_up = model.generate(**inputs, **options, output_attentions=True, return_dict_in_generate=True)
    steps = made_up.decoder_attentions if name == "Mvp" else made_up.attentions
    kept = [tape[key] for key in tape if "encoder_attn" not in key[0]]
    assert len(kept) == 2
    for layer, told in enumerate(kept):
        row = 0
        for step in steps:
            i, j = step[layer].shape[-2:]
            assert off(told[:, :, row : row + i], torch.nn.functional.pad(step[layer], (0, told.shape[3] - j))) < 1e-5
            row += i
        assert row == told.shape[2]
