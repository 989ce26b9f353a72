"""A pruned model computes what `Scale(heads, 0)` gives, before and after it is saved and loaded."""

import copy

import pytest
import torch
from torch import nn

from regard.lens import Scale, capture, edit, load_pruned, prune
from regard.lens.edits.edit import is_meant
from regard.models import Gpt, GptConfig
from regard.models import save as save_for_transformers
from regard.nn import Attention, LatentAttention
from regard.train import checkpoint

WORDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 32, "vocab_size": 50}
GROUPED = {**SIZES, "num_key_value_heads": 2}
SEQ2SEQ = {
    **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "bos_token_id", "decoder_start_token_id"), 2),
    "vocab_size": 50,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PIXELS = {"image_size": 16, "patch_size": 4, "num_labels": 50}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "vocab_size": 50}
FAMILIES = {
    "GPT2LMHeadModel": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50},
        {"*.0.attn": [1, 3], "*.1.attn": 0},
    ),
    "BertForMaskedLM": (SIZES, {"*.0.attention.self": [1, 3], "*.1.attention.self": [0, 1, 2, 3, 4]}),
    "RobertaForMaskedLM": (SIZES, {"*.1.attention.self": [5]}),
    "ElectraForMaskedLM": ({**SIZES, "embedding_size": 36}, {"*.1.attention.self": [5]}),
    "DistilBertForMaskedLM": (DISTILBERT, {"*.attention": [1, 3]}),
    "LlamaForCausalLM": (GROUPED, {"*.0.self_attn": [1, 3, 4, 5], "*.1.self_attn": [0, 1, 2]}),
    "MistralForCausalLM": ({**GROUPED, "sliding_window": 4}, {"*": [1, 3, 4]}),
    "Qwen2ForCausalLM": (GROUPED, {"*.1.self_attn": [2]}),
    "Qwen3ForCausalLM": ({**GROUPED, "head_dim": 8}, {"*.0.self_attn": [0, 5]}),
    "ViTForImageClassification": ({**SIZES, **PIXELS}, {"*.attention": [1, 3]}),
    "BartForConditionalGeneration": (SEQ2SEQ, {"*.0.encoder_attn": 2, "*.decoder.*.self_attn": [0, 1]}),
    "MarianMTModel": (SEQ2SEQ, {"*.encoder.*.self_attn": [1, 3], "*.encoder_attn": [2]}),
    "WhisperForConditionalGeneration": ({**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 9}, {"*.self_attn": 1}),
}
CORE = ("GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "WhisperForConditionalGeneration")


def make(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**FAMILIES[name][0])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.requires_grad else 1)
    return model


def inputs(model):
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    if model.config.model_type == "whisper":
        sound = torch.randn(2, 8, 18, generator=torch.Generator().manual_seed(0))
        return {"input_features": sound, "decoder_input_ids": WORDS}
    return {"input_ids": WORDS} | ({"decoder_input_ids": WORDS[:, :7]} if model.config.is_encoder_decoder else {})


def switched_off(model, heads, run):
    edits = {name: Scale(numbers, 0) for name, numbers in heads.items()}
    with torch.no_grad(), edit(model, edits):
        return run(model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CORE else pytest.mark.libraries) for name in FAMILIES]
)
@pytest.mark.filterwarnings("ignore::regard.lens.CaptureWarning")
def test_a_pruned_model_of_transformers_equals_one_with_heads_off(name, tmp_path):
    model, (_, heads) = make(name), FAMILIES[name]

    def run(model):
        return model(**inputs(model)).logits

    want, plain = switched_off(model, heads, run), run(model)
    weights = sum(x.numel() for x in model.parameters())
    with capture(model) as tape, torch.no_grad():
        run(model)
    assert prune(model, heads) is model
    assert sum(x.numel() for x in model.parameters()) < weights
    with capture(model) as pruned_tape, torch.no_grad():
        torch.testing.assert_close(run(model), want, atol=1e-5, rtol=1e-5)
    assert (want - plain).abs().max() > 1e-3
    first = next(iter(tape))  # its input is the same
    gone = [
        n for pattern, numbers in heads.items() if is_meant(first[0], pattern) for n in torch.tensor(numbers).view(-1)
    ]
    left = [head for head in range(tape[first].shape[1]) if head not in gone]
    torch.testing.assert_close(pruned_tape[first].dense(), tape[first].dense()[:, left], atol=1e-6, rtol=1e-5)

    model.save_pretrained(tmp_path)
    loaded = load_pruned(tmp_path).eval()
    assert type(loaded) is type(model)
    torch.testing.assert_close(run(loaded), want, atol=1e-5, rtol=1e-5)
    fresh = make(name)
    prune(fresh, model.config.pruned_heads)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(run(fresh), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "MarianMTModel"])
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_a_pruned_model_generates_as_one_with_heads_off(name, cache):
    model, heads = make(name), FAMILIES[name][1]

    def run(model):
        options = {"cache_implementation": cache} if cache == "static" else {"use_cache": cache is not None}
        return model.generate(WORDS[:1], max_new_tokens=6, do_sample=False, **options)

    want = switched_off(model, heads, run)
    assert torch.equal(run(prune(model, heads)), want)


def test_equal_heads_in_every_layer_fit_into_the_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make("LlamaForCausalLM")
    want = switched_off(model, {"*": [1, 3]}, lambda model: model(WORDS).logits)
    prune(model, {"*.0.self_attn": [1, 3]})
    assert model.config.pruned_heads == {"model.layers.0.self_attn": [1, 3]}
    prune(model, {"*.1.self_attn": [1, 3]})
    assert not hasattr(model.config, "pruned_heads")
    model.save_pretrained(tmp_path)
    for loaded in (transformers.AutoModelForCausalLM.from_pretrained(tmp_path), load_pruned(tmp_path)):
        assert (loaded.config.num_attention_heads, loaded.config.head_dim) == (4, 6)
        torch.testing.assert_close(loaded.eval()(WORDS).logits, want, atol=1e-5, rtol=1e-5)


def test_heads_are_pruned_step_by_step(tmp_path):
    model = make("BertForMaskedLM")
    want = switched_off(model, {"*.0.attention.self": [0, 2, 5]}, lambda model: model(WORDS).logits)
    prune(model, {"*.0.attention.self": 2})
    prune(model, {"*.0.attention.self": [0, 4]})  # 0 and 5 of the first numbers
    assert model.config.pruned_heads == {"bert.encoder.layer.0.attention.self": [0, 2, 5]}
    torch.testing.assert_close(model(WORDS).logits, want, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(load_pruned(tmp_path)(WORDS).logits, want, atol=1e-5, rtol=1e-5)


def test_a_pruned_gpt_of_regard_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    config = GptConfig(vocabulary=50, dim=32, depth=2, heads=4, kv_heads=2)
    model = Gpt(config).eval()
    layers = [name for name, part in model.named_modules() if isinstance(part, Attention)]
    heads = {layers[0]: [0, 1], layers[1]: 3}
    want = switched_off(model, heads, lambda model: model(WORDS))
    other = prune(copy.deepcopy(model), heads)
    torch.testing.assert_close(other(WORDS), want, atol=1e-5, rtol=1e-5)
    assert model(WORDS).shape == want.shape
    assert other.get_submodule(layers[0]).kept_heads.tolist() == [2, 3]
    loaded = Gpt(config).eval()
    loaded.load_state_dict(other.state_dict())
    torch.testing.assert_close(loaded(WORDS), want, atol=1e-5, rtol=1e-5)
    checkpoint.write(tmp_path / "step-00000001", {"model.safetensors": checkpoint.tensors(other)})
    again = Gpt(config).eval()
    checkpoint.load(tmp_path / "step-00000001", again)
    torch.testing.assert_close(again(WORDS), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"one number of heads for all layers; save model.state_dict\(\)"):
        save_for_transformers(other, tmp_path / "theirs")


def test_what_cannot_be_pruned_is_refused_and_nothing_is_changed():
    model = nn.ModuleDict(
        {"one": Attention(16, 4), "two": LatentAttention(16, heads=4, latent=8, head_dim=4, rotary_dim=2)}
    )
    for heads, error, message in [
        ({"one": [0], "two": [0]}, ValueError, "prune does not know where the heads of 'two', a LatentAttention, are"),
        ({"one": [0, 4]}, IndexError, "heads of 'one' must be from 0 to 3"),
        ({"one": [0, 1, 2, 3]}, ValueError, r"would leave 'one' without heads.*Scale\(None, 0\)"),
        ({"three": [0]}, ValueError, "the model has no layer 'three'"),
        ([0], TypeError, "heads must be a dict from layers to heads"),
        ({"one": "0"}, TypeError, "must be a list of their numbers"),
    ]:
        with pytest.raises(error, match=message):
            prune(model, heads)
        assert model["one"].heads == 4
    transformers = pytest.importorskip("transformers")
    t5 = transformers.T5Model(
        transformers.T5Config(d_model=16, num_heads=2, num_layers=1, d_kv=8, d_ff=8, vocab_size=9)
    )
    with pytest.raises(ValueError, match=r"a T5Attention, are in its weights; switch its heads off with edit"):
        prune(t5, {"encoder.block.0.layer.0.SelfAttention": [0]})
    llama = make("LlamaForCausalLM")
    llama.model.layers[0].self_attn.q_proj = nn.Sequential(nn.Linear(36, 36))
    with pytest.raises(ValueError, match="has a Sequential for a linear map"):
        prune(llama, {"*.0.self_attn": [0]})
