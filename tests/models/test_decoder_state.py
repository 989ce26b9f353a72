"""Decoders step by step: with prepared weights as without, and past a prefix without its logits."""

import pytest
import torch

from regard.decode import Ensemble, beam, greedy, sample, score
from regard.lens import capture
from regard.models import (
    Captioner,
    CaptionerConfig,
    Gpt,
    GptConfig,
    Pointer,
    PointerConfig,
    Seq2Seq,
    Seq2SeqConfig,
    Transformer,
    TransformerConfig,
)
from regard.nn import prepacked
from regard.nn.fast_decode import FastSteps

END, START, VOCABULARY = 0, 1, 31


def gpt():
    return Gpt(GptConfig(vocabulary=VOCABULARY, length=40, dim=12, depth=2, heads=3, dropout=0.0))


def llama():
    return Gpt(GptConfig.llama(vocabulary=VOCABULARY, dim=12, depth=2, heads=3, kv_heads=1, window=5))


def transformer(tied="output"):
    sizes = {"dim": 12, "heads": 3, "hidden": 20, "encoder_layers": 1, "decoder_layers": 2, "tied": tied}
    vocabularies = {"source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY}
    return Transformer(TransformerConfig(**vocabularies, **sizes, start=START, output_bias=True))


MODELS = {"gpt": gpt, "llama": llama, "transformer": transformer, "untied": lambda: transformer("none")}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(3)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def source_of(stepper, rows):
    if isinstance(stepper, Gpt) or isinstance(getattr(stepper, "members", [None])[0], Gpt):
        return None
    return {"source": torch.arange(rows * 6).view(rows, 6) % VOCABULARY, "source_lengths": torch.arange(rows) % 4 + 3}


def written(model, rows):
    source, prefix = source_of(model, rows), [[START, 2 + row, 5] for row in range(rows)]
    limits = {"end": END, "max_length": 9}
    return (
        [one.tokens for one in greedy(model, source, prefix, **limits)],
        [[one.tokens for one in best] for best in beam(model, source, prefix, width=4, n_best=3, **limits)],
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_prepacked_weights_write_the_same(model, rows, monkeypatch):
    expected = written(model, rows)
    used = []
    monkeypatch.setattr(prepacked, "MIN_PREPACKED_ENTRIES", 0)
    monkeypatch.setattr(prepacked, "PAD_SINGLE_ROWS", True)
    multiply = prepacked.PrepackedWeights._multiply_packed
    monkeypatch.setattr(
        prepacked.PrepackedWeights, "_multiply_packed", lambda self, *given: used.append(self) or multiply(self, *given)
    )
    assert written(model, rows) == expected
    if prepacked.CAN_PREPACK:
        assert len(set(used)) == (1 if rows == 1 else 2)  # one per decoding; greedy has one if there are several rows


@pytest.mark.parametrize("rows", [1, 3])
def test_fast_steps_write_what_the_modules_write(model, rows, monkeypatch):
    made, steps = [], FastSteps.steps
    monkeypatch.setattr(FastSteps, "steps", lambda self: made.append(steps(self)) or made[-1])
    expected = written(model, rows)
    assert made
    assert None not in made
    monkeypatch.setattr(FastSteps, "steps", lambda self: None)
    assert written(model, rows) == expected


@torch.no_grad()
def test_a_token_at_a_time_gives_the_logits_of_the_whole_pass(model):
    model, ids = model.double(), torch.randint(2, VOCABULARY, (3, 9))
    if isinstance(model, Gpt):
        whole, state = model(ids), model.start(None)
    else:
        batch = source_of(model, 3)
        whole, state = model(batch["source"], ids, source_lengths=batch["source_lengths"]), model.start(batch)
    steps = []
    for tokens in ids.unbind(1):
        logits, state = model.step(tokens, state)
        steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, 1), whole, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_padded_prompt_goes_on_a_token_at_a_time_as_in_one_pass(kind):
    torch.manual_seed(0)
    model, ids = MODELS[kind]().double().eval(), torch.randint(2, VOCABULARY, (2, 11))
    keep = torch.arange(11) >= torch.tensor([[0], [3]])
    whole, state = model(ids, keep=keep), model.start((ids[:, :5], keep[:, :5]))
    for n in range(5, 11):
        logits, state = model.step(ids[:, n], state)
        torch.testing.assert_close(logits, whole[:, n], rtol=0, atol=1e-10)


def test_whoever_captures_sees_every_step(model):
    expected, source, prefix = written(model, 1)[0], source_of(model, 1), [[START, 2, 5]]
    with capture(model) as tape:
        found = greedy(model, source, prefix, end=END, max_length=9)
    assert [one.tokens for one in found] == expected
    watched = {"blocks.0.attention": "self.0"} if isinstance(model, Gpt) else {"decoder.blocks.1.cross": "cross.1"}
    for layer, name in watched.items():
        (shown,) = greedy(model.watched(name), source, prefix, end=END, max_length=9)
        rows = tape[layer].dense()[0][:, -len(shown.tokens) :]
        torch.testing.assert_close(rows, shown.attention[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["feedforward", "attention", "attention.out", "attention.core"])
def test_a_replaced_forward_counts_at_every_step(model, name):
    blocks = model.blocks if isinstance(model, Gpt) else model.decoder.blocks
    module = blocks[0].get_submodule(name)
    module.forward = lambda *given, **told: type(module).forward(module, *given, **told) * 0
    source, prefix = source_of(model, 2), [[START, 4], [START, 3]]
    found = greedy(model, source, prefix, end=None, max_length=6)
    again = score(model, source, prefix, [[one.tokens] for one in found])
    for one, (other,) in zip(found, again, strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-3)


@torch.no_grad()
def test_a_dropout_of_the_embedding_alone_acts_at_every_step():
    model = Gpt(GptConfig(vocabulary=VOCABULARY, length=40, dim=12, depth=1, heads=3, dropout=0.5)).eval()
    _, state = model.step(torch.tensor([1]), model.start())
    model.dropout.train()
    assert not torch.equal(model.step(torch.tensor([2]), state)[0], model.step(torch.tensor([2]), state)[0])


def test_a_prefix_is_read_without_logits(model, monkeypatch):
    expected = written(model, 3)
    seen = []
    owner = model if isinstance(model, Gpt) else model.decoder
    logits = owner.logits
    monkeypatch.setattr(owner, "logits", lambda x: seen.append(x[..., 0].numel() // x.shape[0]) or logits(x))
    assert written(model, 3) == expected
    assert set(seen) == {1}
    assert written(Ensemble([model]), 3) == expected
    assert set(seen) == {1}


def test_weights_may_change_between_decodings_in_any_way(model, monkeypatch):
    monkeypatch.setattr(prepacked, "MIN_PREPACKED_ENTRIES", 0)
    first = written(model, 3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.4)  # leaves no trace in its version
    changed = written(model, 3)
    monkeypatch.setattr(prepacked, "MAX_PREPACKED_ROWS", 0)
    assert changed == written(model, 3) != first


LIMITS = {"end": END, "max_length": 5}
SEARCHES = {
    "greedy": lambda *given: greedy(*given, **LIMITS),
    "sample": lambda *given: sample(*given, seed=0, samples=2, **LIMITS),
    "beam": lambda *given: beam(*given, width=3, **LIMITS),
    "score": lambda *given: score(*given, [[(4,)]] * len(given[2])),
}
SIZES = {"source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY, "start": START, "dim": 12, "hidden": 20}
IMAGES = {"vocabulary": VOCABULARY, "start": START, "widths": (4,), "dim": 12, "hidden": 20, "heads": 3}


def read(rows=2):
    return torch.arange(rows * 6).view(rows, 6) % VOCABULARY


SOURCES = {
    "transformer": lambda: (transformer(), {"source": read()}),
    "watched": lambda: (transformer().watched(), {"source": read()}),
    "seq2seq": lambda: (Seq2Seq(Seq2SeqConfig(**SIZES)), {"source": read()}),
    "squeezed": lambda: (Seq2Seq(Seq2SeqConfig(**SIZES, attention=None)), {"source": read()}),
    "pointer": lambda: (Pointer(PointerConfig(**SIZES, unknown=3)), {"source": read(), "copies": read()}),
    "captioner": lambda: (Captioner(CaptionerConfig(**IMAGES)), {"image": torch.rand(2, 3, 8, 8)}),
    "telling": lambda: (
        Captioner(CaptionerConfig(**IMAGES, attention="transformer")),
        {"image": torch.rand(2, 3, 8, 8)},
    ),
    "gpt": lambda: (gpt(), read()),
    "padded": lambda: (llama(), (read(), read() > 0)),
    "ensemble": lambda: (Ensemble([transformer(), Seq2Seq(Seq2SeqConfig(**SIZES))]), {"source": read()}),
}


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", SOURCES)
def test_a_prefix_has_as_many_rows_as_the_source(kind, search, rows):
    stepper, source = SOURCES[kind]()
    wrong = rf"prefix must have a row for each row of the source, got {rows} rows and a source of 2; write prefix=\[\["
    with pytest.raises(ValueError, match=wrong):
        SEARCHES[search](stepper, source, [[START]] * rows)
    assert len(SEARCHES[search](stepper, source, [[START, 5]] * 2)) == 2


def test_a_state_knows_its_rows_when_some_are_selected():
    for stepper, source in (make() for make in SOURCES.values()):
        with torch.no_grad():
            state = stepper.start(source)
            assert (state.rows, state.select(torch.tensor([1, 1, 0, 0])).rows) == (2, 4)
    assert gpt().start(None).rows is None
