"""generate of Hugging Face models: one text that grows, whatever the search does."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

import tests.lens.tiny_transformers as zoo
from regard.lens import Scale, capture, edit
from tests.lens.eager_weights import CLOSE, SEQ2SEQ, assert_same, eager_weights, inputs_of, scale_of

GENERATION = [
    pytest.param(build, implementation, side, how, id=f"{build.__name__}-{implementation}-{side}-{name}")
    for build in (zoo.gpt2, zoo.llama, zoo.mistral, zoo.t5, zoo.marian, zoo.whisper)
    for implementation in ("sdpa", "eager")
    for side in ((None, "left") if build not in SEQ2SEQ else (None,))
    for name, how in {
        "dynamic": {},
        "uncached": {"use_cache": False},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
    }.items()
    if implementation == "sdpa" or name in ("dynamic", "beams")
]


@pytest.mark.libraries
@pytest.mark.parametrize(("build", "implementation", "side", "how"), GENERATION)
def test_rows_of_each_new_token_join_the_tape(build, implementation, side, how):
    model = zoo.made(build, implementation, scale_of(build))
    model.generation_config.eos_token_id = None
    inputs = {name: x for name, x in inputs_of(build, side).items() if name != "decoder_input_ids"}
    asked = {"max_new_tokens": 8, "do_sample": False, **how}
    plain = model.generate(**inputs, **asked)
    with capture(model) as tape:
        watched = model.generate(**inputs, **asked)
    assert torch.equal(plain, watched)
    # The last token is written, never read, unless the finished beams were replayed whole.
    sequences = watched if "num_beams" in how else watched[:, :-1]
    assert_same(tape, *whole_pass(build, inputs, sequences))


@pytest.mark.compiled
@pytest.mark.usefixtures("dynamo")
def test_a_generation_that_compiles_its_steps_is_captured_and_edited():
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    model, ids = zoo.made(zoo.llama), zoo.ids()
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    with capture(model) as expected, edit(model, {"*": Scale(0, 0)}):
        edited = model.generate(ids, disable_compile=True, **asked)
    with capture(model) as expected:
        plain = model.generate(ids, disable_compile=True, **asked)
    asked["compile_config"] = config
    assert torch.equal(model.generate(ids, **asked), plain)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with capture(model) as tape:
        assert torch.equal(model.generate(ids, **asked), plain)
    assert not tape.unseen
    for key, A in tape.items():
        torch.testing.assert_close(A.dense(), expected[key].dense())
    with edit(model, {"*": Scale(0, 0)}):
        assert torch.equal(model.generate(ids, **asked), edited)
    assert torch.equal(model.generate(ids, **asked), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
    assert "get_compiled_call" not in vars(model)


@pytest.mark.parametrize("how", [{"eos_token_id": -1}, {"generation_config": True}], ids=["argument", "config"])
def test_replayed_beams_end_at_the_end_token_of_the_search(how):
    model = zoo.made(zoo.llama, "sdpa", scale_of(zoo.llama))
    inputs = {name: x for name, x in inputs_of(zoo.llama, None).items() if name == "input_ids"}
    asked = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    model.generation_config.eos_token_id = None
    ends = model.generate(**inputs, **asked)[0, -4].item()  # a token that would end it, were it asked
    model.generation_config.eos_token_id = ends
    if "generation_config" in how:
        how = {"generation_config": type(model.generation_config)(eos_token_id=-1, pad_token_id=0)}
    with capture(model) as tape:
        written = model.generate(**inputs, **asked, **how, pad_token_id=0)
    assert_same(tape, *whole_pass(zoo.llama, inputs, written))


class Chat(torch.nn.Module):
    """A model within another, which lets it write."""

    def __init__(self, writer):
        super().__init__()
        self.writer = writer

    def forward(self, ids, **asked):
        return self.writer.generate(ids, **asked)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {"use_cache": False}], ids=str)
def test_a_generation_within_another_model_is_one_call(how):
    model = zoo.made(zoo.llama, "sdpa", scale_of(zoo.llama))
    model.generation_config.eos_token_id = None
    ids, asked = zoo.ids(n=9)[:1].clamp(min=1), {"max_new_tokens": 6, "do_sample": False, **how}
    with capture(model) as tape:
        model.generate(ids, **asked)
    chat = Chat(model)
    with capture(chat) as outside:
        chat(ids, **asked)
    assert "generate" not in vars(model)
    assert [f"writer.{name}" for name, _ in tape] == [name for name, _ in outside]
    for key in tape:
        torch.testing.assert_close(outside["writer." + key[0], key[1]].dense(), tape[key].dense())


def test_beams_are_replayed_with_the_inferred_padding():
    model = zoo.made(zoo.llama, "sdpa", scale_of(zoo.llama))
    model.generation_config.eos_token_id = None
    ids = zoo.ids(n=9).clamp(min=1)
    ids[0, :3] = 0
    with capture(model) as tape:
        written = model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=2, pad_token_id=0)
    assert_same(tape, *whole_pass(zoo.llama, {"input_ids": ids, "attention_mask": (ids != 0).long()}, written))


def whole_pass(build, inputs, sequences):
    """The eager weights of one pass over finished sequences, and which of their tokens are real."""
    inputs = {name: x.repeat_interleave(len(sequences) // 2, 0) for name, x in inputs.items()}
    if build in SEQ2SEQ:
        started = sequences if build is not zoo.whisper else torch.nn.functional.pad(sequences, (1, 0), value=1)
        return eager_weights(build, **inputs, decoder_input_ids=started), None
    real = torch.ones_like(sequences)
    real[:, :9] = inputs.get("attention_mask", 1)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    return eager_weights(build, input_ids=sequences, attention_mask=real, position_ids=positions), real


@pytest.mark.parametrize("build", [zoo.llama, zoo.gpt2, zoo.t5])
@pytest.mark.parametrize("how", [{}, {"num_return_sequences": 2}, {"padded": True}, {"with_ids": True}], ids=str)
def test_beams_may_begin_with_embeddings(build, how):
    model, ids, asked = zoo.made(build), zoo.ids(n=6), {"num_beams": 2, "max_new_tokens": 5, "min_new_tokens": 5, **how}
    if asked.pop("padded", False):
        asked["attention_mask"] = zoo.padding("left", n=6, real=4)
    prompt = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    if asked.pop("with_ids", False) and build is not zoo.t5:
        prompt["input_ids"] = ids
    with torch.no_grad(), capture(model) as truth:
        model.generate(ids, **asked)
    with torch.no_grad(), capture(model) as tape:
        model.generate(**prompt, **asked)
    assert list(tape) == list(truth)
    for key in truth:
        torch.testing.assert_close(tape[key].dense(), truth[key].dense())


def test_a_second_generation_is_a_second_call():
    model = zoo.made(zoo.llama)
    with capture(model) as tape:
        for n in (5, 9):
            model.generate(zoo.ids(b=1, n=n), max_new_tokens=3, do_sample=False)
    assert [A.shape[2] for A in tape.calls("model.layers.0.self_attn")] == [7, 11]


def test_a_second_generation_from_the_same_source_is_a_second_call():
    model = zoo.made(zoo.marian)
    model.generation_config.eos_token_id = None
    with capture(model) as tape:
        for n in (3, 5):
            model.generate(zoo.ids(), max_new_tokens=n, do_sample=False)
    first, again = tape.calls("model.encoder.layers.0.self_attn")
    assert torch.equal(first.dense(), again.dense())
    assert [A.shape[2] for A in tape.calls("model.decoder.layers.0.encoder_attn")] == [3, 5]
    assert [A.shape[2] for A in tape.calls("model.decoder.layers.1.self_attn")] == [3, 5]


def test_passes_of_a_generation_without_a_cache_replace_one_another():
    model, last = zoo.made(zoo.llama), 9 + 8 - 1
    queries_and_keys, statistic = 2 * (4 + 2) * last * 6 * 4, 2 * 4 * last * 4
    with capture(model, budget=f"{2 * (queries_and_keys + statistic)}B") as tape:
        model.generate(zoo.ids(), max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=False)
    assert [tuple(A.shape) for A in tape.values()] == [(2, 4, last, last)] * 2


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}], ids=str)
def test_threads_that_capture_one_model_generate_side_by_side(how):
    model, meet = zoo.made(zoo.llama), threading.Barrier(3, timeout=60)
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **how}

    def written(n):
        meet.wait()
        with torch.no_grad(), capture(model) as tape:
            out = model.generate(zoo.ids(n=n), **asked)
        return out[:, : None if how else -1], tape

    with ThreadPoolExecutor(3) as pool:
        for sequences, tape in pool.map(written, (3, 5, 8)):
            assert len(tape) == model.config.num_hidden_layers
            assert_same(tape, eager_weights(zoo.llama, input_ids=sequences))
    assert "generate" not in vars(model)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}], ids=str)
def test_nested_captures_record_a_generation(how):
    model, ids = zoo.made(zoo.llama), zoo.ids(n=4)
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **how}
    with torch.no_grad(), capture(model) as outer, capture(model) as inner:
        written = model.generate(ids, **asked)
    for tape in (outer, inner):
        assert_same(tape, eager_weights(zoo.llama, input_ids=written[:, : None if how else -1]))


@pytest.mark.parametrize("drafted", ["lookup", "assistant"])
def test_drafted_tokens_leave_no_rows(drafted):
    model, prompt = zoo.made(zoo.llama), zoo.ids(1, 9).repeat(1, 2)
    asked = {"prompt_lookup_num_tokens": 3} if drafted == "lookup" else {"assistant_model": zoo.made(zoo.llama)}
    with capture(model) as tape:
        written = model.generate(prompt, max_new_tokens=7, min_new_tokens=7, do_sample=False, **asked)
    with capture(model) as truth, torch.no_grad():
        model(written)
    assert list(tape) == list(truth)
    for name in truth:
        assert (tape[name].dense() - truth[name].dense()).abs().max() < CLOSE
