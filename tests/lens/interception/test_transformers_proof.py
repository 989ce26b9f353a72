"""Functions behind the attention interface of transformers that are not its own: shown as they attend, or left out."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import transformers as hf
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.llama import modeling_llama

import tests.lens.tiny_transformers as zoo
from regard import Causal
from regard.lens import CaptureWarning, ablate, capture
from regard.lens.interception import transformers_proof
from regard.lens.interception.transformers_proof import is_own
from tests.lens.eager_weights import CLOSE, assert_same, eager_weights

USED: list[torch.Tensor] = []  # the weights that the functions below multiply with the values


@pytest.fixture(autouse=True)
def register(registries):
    """Register functions of attention and masks for one test."""
    USED.clear()

    def register(function, mask=eager_mask, name="mine"):
        registries.AttentionInterface.register(name, function)
        if mask is not None:
            registries.AttentionMaskInterface.register(name, mask)

    return register


def repeated(q, *tensors):
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in tensors]


def written_out(change=lambda s: s, after=lambda A: A, returns=True):
    """softmax(change(s)) @ v by hand, which notes its weights and returns them if asked to."""

    def mine(module, q, k, v, mask, scaling=None, dropout=0.0, **given):
        k, v = repeated(q, k, v)
        s = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        A = after(change(s if mask is None else s + mask[..., : s.shape[-1]]).softmax(-1))
        A = F.dropout(A, dropout, module.training)
        USED.append(A.detach())
        return (A @ v).transpose(1, 2).contiguous(), A if returns else None

    return mine


def top2(s):
    return s.masked_fill(s < s.topk(min(2, s.shape[-1]), -1).values[..., -1:], -1e30)


def without_sink(s):
    return s if s.shape[-1] < 2 else torch.cat((s[..., :1] - 1e9, s[..., 1:]), -1)


def knockout(module, q, k, v, mask, **given):
    """Hides key 2 with a finite number, and lets SDPA attend."""
    i, j = q.shape[2], k.shape[2]
    hidden = torch.ones(i, j).triu(1 + j - i) * -1e9 if mask is None else mask[..., :j].clone()
    hidden[..., 3:, 2] = hidden[..., 3:, 2].clamp(max=-1e9)
    return sdpa_attention_forward(module, q, k, v, hidden.expand(len(q), 1, i, j), **given)


def hot(module, q, k, v, mask, scaling=None, **given):
    return sdpa_attention_forward(module, q, k, v, mask, scaling=3 * scaling, **given)


def watched(build=zoo.llama, name="mine", **inputs):
    """The tape of a model whose layers call the function of this name; its outputs are those of a plain pass."""
    model = zoo.made(build, "eager")
    model.set_attn_implementation(name)
    inputs = inputs or {"input_ids": zoo.ids()}
    with torch.no_grad():
        want = model(**inputs)[0]
        USED.clear()
        with capture(model) as tape:
            assert torch.equal(model(**inputs)[0], want)
    return tape


def assert_shows_used(tape, real=None):
    assert len(tape) == len(USED)
    for A, used in zip(tape.values(), USED, strict=True):
        error = (A.dense() - used).abs()
        error = error if real is None else error * real.bool()[:, None, :, None]
        assert error.max() < CLOSE


@pytest.mark.parametrize("build", [zoo.llama, zoo.bert, zoo.gpt2], ids=lambda build: build.__name__)
@pytest.mark.parametrize("change", [top2, without_sink, lambda s: 3 * s], ids=["top2", "sink hidden", "temperature"])
def test_weights_that_a_registered_function_returns_are_shown(register, build, change):
    register(written_out(change))
    with pytest.warns(CaptureWarning, match="did not attend by softmax.* of the arguments of mine.* MB"):
        tape = watched(build)
    assert_shows_used(tape)


@pytest.mark.parametrize("side", ["left", "right"])
def test_returned_weights_are_shown_with_padding(register, side):
    register(written_out(top2))
    mask = zoo.padding(side)
    with pytest.warns(CaptureWarning, match="mine"):
        tape = watched(input_ids=zoo.ids(), attention_mask=mask)
    assert_shows_used(tape, mask)


def test_a_layer_whose_function_returns_no_weights_is_left_out(register):
    register(written_out(top2, returns=False))
    with pytest.raises(ValueError, match="mine runs code that is not of transformers, and its output is not softmax"):
        watched()


def test_weights_that_do_not_give_the_output_are_not_shown(register):
    def mine(*args, **given):
        out, A = written_out(top2)(*args, **given)
        return out, A.flip(-1)

    register(mine)
    with pytest.raises(ValueError, match="mine runs code that is not of transformers"):
        watched()


def test_returned_rows_that_do_not_sum_to_one_are_shown_as_they_are(register):
    register(written_out(after=lambda A: 0.5 * A))
    with pytest.warns(CaptureWarning, match="mine"):
        tape = watched()
    assert_shows_used(tape)
    assert set(tape.changed.values()) == {"returned by mine"}


@pytest.mark.parametrize("given", [{}, {"attention_mask": zoo.padding("left")}], ids=["causal", "padded"])
def test_a_call_of_sdpa_with_other_arguments_is_shown(register, given):
    register(knockout, sdpa_mask if not given else eager_mask)
    tape = watched(input_ids=zoo.ids(), **given)
    register(written_out(lambda s: s.index_fill(-1, torch.tensor([2]), -1e9).where(torch.arange(9)[:, None] > 2, s)))
    want = zoo.made(zoo.llama, "eager")
    want.set_attn_implementation("mine")
    USED.clear()
    with torch.no_grad():
        want(input_ids=zoo.ids(), **given)
    real = given.get("attention_mask")
    assert_shows_used(tape, real)
    assert all(A.dense()[:, :, 3:, 2].max() == 0 for A in tape.values())


def test_another_temperature_by_sdpa_is_shown(register):
    register(hot, sdpa_mask)
    tape = watched()
    register(written_out(lambda s: 3 * s))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = zoo.made(zoo.llama, "eager")
        model.set_attn_implementation("mine")
        USED.clear()
        model(input_ids=zoo.ids())
    assert_shows_used(tape)


@pytest.mark.filterwarnings("error::regard.lens.CaptureWarning")
@pytest.mark.parametrize("build", [zoo.llama, zoo.mistral, zoo.bert, zoo.marian], ids=lambda build: build.__name__)
def test_a_registered_function_that_is_softmax_attention_is_shown_in_terms(register, build):
    register(written_out(returns=False))
    inputs = {"input_ids": zoo.ids(), "attention_mask": zoo.padding("right")}
    inputs |= {"decoder_input_ids": zoo.ids(n=7)} if build is zoo.marian else {}
    tape = watched(build, **inputs)
    assert_same(tape, eager_weights(build, **inputs))
    assert all("Added" not in repr(A) for A in tape.values())


@pytest.mark.filterwarnings("error::regard.lens.CaptureWarning")
@pytest.mark.parametrize("function", [written_out(), sdpa_attention_forward], ids=["by hand", "sdpa"])
def test_a_registered_function_without_a_mask_function_is_shown(register, function):
    register(function, mask=None)
    tape = watched()
    is_causal = function is sdpa_attention_forward
    assert all(A.call.mask == (Causal() if is_causal else None) for A in tape.values())


@pytest.mark.filterwarnings("error::regard.lens.CaptureWarning")
def test_an_output_of_joined_heads_is_read(register):
    def mine(*args, **given):
        out, A = written_out()(*args, **given)
        return out.flatten(2), A

    register(mine)
    assert_shows_used(watched())


@pytest.mark.parametrize("change", [top2, lambda s: s], ids=["top2", "same"])
def test_generation_with_a_cache_is_one_matrix(register, change):
    register(written_out(change))
    model, ids = zoo.made(zoo.llama, "eager"), zoo.ids()
    model.set_attn_implementation("mine")
    with warnings.catch_warnings(record=True) as met, capture(model) as tape:
        warnings.simplefilter("always")
        out = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert len([each for each in met if each.category is CaptureWarning]) == (change is top2)
    USED.clear()
    with torch.no_grad():
        model(out[:, :-1])
    assert_shows_used(tape)


def test_a_patched_eager_function_is_shown_as_it_attends(monkeypatch):
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", written_out(without_sink))
    with pytest.warns(CaptureWarning, match="mine"):
        tape = watched(name="eager")
    assert_shows_used(tape)
    assert all(A.dense()[:, :, 1:, 0].max() == 0 for A in tape.values())


def test_a_function_over_an_existing_name_is_checked(register):
    register(written_out(top2), mask=None, name="sdpa")
    with pytest.warns(CaptureWarning, match="mine"):
        tape = watched(name="sdpa")
    assert_shows_used(tape)


def test_a_patched_helper_of_an_own_function_is_checked(monkeypatch):
    rolled = modeling_llama.repeat_kv
    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda x, n: rolled(x, n).roll(1, 2))
    with pytest.raises(ValueError, match="eager_attention_forward runs code that is not of transformers"):
        watched(name="eager")  # the values that it returned weights for are rolled too


def test_sdpa_that_other_code_replaced_is_checked(monkeypatch):
    sdpa = F.scaled_dot_product_attention

    def sharper(q, k, v, *args, **given):
        return sdpa(3 * q, k, v, *args, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sharper)
    with pytest.raises(ValueError, match="sdpa_attention_forward runs code that is not of transformers"):
        watched(name="sdpa")
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **given: sdpa(*args, **given))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        assert_same(watched(name="sdpa"), eager_weights(zoo.llama, input_ids=zoo.ids()))


def test_dropout_is_compared_by_returned_weights_or_left_out(register):
    def trained(function):
        register(function)
        model = zoo.made(zoo.llama, "eager").train()
        model.set_attn_implementation("mine")
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        with capture(model) as tape:
            model(zoo.ids())
        return tape

    with pytest.raises(ValueError, match="mine runs code that is not of transformers, and dropout was active"):
        trained(written_out())

    def mine(module, q, k, v, mask, dropout=0.0, **given):  # returns its weights as they were before
        with torch.no_grad():
            _, A = written_out()(module, q, k, v, mask, **given)
        return (F.dropout(A, dropout) @ repeated(q, v)[0]).transpose(1, 2), A

    USED.clear()
    assert_shows_used(trained(mine))


def test_an_unknown_mask_does_not_stop_the_model(register):
    def mine(module, q, k, v, mask, **given):
        return written_out()(module, q, k, v, None if mask is None else mask["added"], **given)

    register(mine, mask=lambda *args, **given: {"added": eager_mask(*args, **given)})
    with pytest.warns(CaptureWarning, match="mine"):
        assert_shows_used(watched())


def test_heads_of_a_registered_function_are_ablated_as_before(register):
    model, ids = zoo.made(zoo.llama, "eager"), zoo.ids()
    name = "model.layers.0.self_attn"
    outs = []
    for implementation, function in (("mine", written_out()), ("eager", None)):
        if function is not None:
            register(function)
        model.set_attn_implementation(implementation)
        with torch.no_grad(), ablate(model, {name: [1]}), warnings.catch_warnings():
            outs.append(model(ids).logits)
    torch.testing.assert_close(*outs)


def test_only_functions_as_transformers_wrote_them_are_its_own(monkeypatch):
    eager = modeling_llama.eager_attention_forward
    assert is_own(eager, {})
    assert is_own(sdpa_attention_forward, {"position_bias": torch.ones(1)})
    assert not is_own(eager, {"s_aux": torch.ones(4)})  # it takes none
    assert not is_own(sdpa_attention_forward, {"cache": object()})
    assert not is_own(written_out(), {})
    assert not is_own(lambda *args: eager(*args), {})
    claims = written_out()
    claims.__module__, claims.__name__ = eager.__module__, eager.__name__
    assert not is_own(claims, {})
    into: dict[str, object] = vars(modeling_llama).copy()
    exec("def eager_attention_forward(*args): return None", into)
    assert not is_own(into["eager_attention_forward"], {})
    monkeypatch.setattr(F, "softmax", lambda *args, **given: torch.softmax(*args, **given))
    assert not is_own(eager, {})


def test_the_functions_of_transformers_are_its_own():
    for name, function in hf.AttentionInterface._global_mapping.items():
        assert name.startswith("paged") or is_own(function, {}), name
    for build in (zoo.bert, zoo.gpt2, zoo.llama, zoo.mistral, zoo.t5, zoo.marian, zoo.vit, zoo.whisper, zoo.gemma2):
        function = vars(sys.modules[type(build()).__module__]).get("eager_attention_forward")
        assert function is None or is_own(function, {}), build


def test_more_rows_than_a_few_are_compared(register, monkeypatch):
    def one_row(s):
        return torch.where((torch.arange(s.shape[-2]) == 8)[:, None], top2(s), s)

    register(written_out(one_row))
    with pytest.warns(CaptureWarning, match="mine"):
        assert_shows_used(watched(input_ids=zoo.ids(n=40)))
    monkeypatch.setattr(transformers_proof, "MAX_COMPARED_ENTRIES", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        watched(input_ids=zoo.ids(n=40))  # row 8 is not among 8 of 40
