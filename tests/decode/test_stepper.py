"""Steppers: logits of any precision, tensors that are left alone, and what a state may leave out."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from regard.decode import Ensemble, beam, greedy, sample
from regard.decode.prefix import TargetPrefix
from regard.decode.stepper import advance, attention_of, device_of, read, rows_of, to_device
from regard.models import Gpt, GptConfig, Transformer, TransformerConfig
from tests.decode.searches import END, MOST, ROWS, starts
from tests.decode.steppers import History, Table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_of_half_precision_logits_are_summed_in_full(search, dtype):
    model = Table(300, 0, dtype=dtype)
    for code, best in enumerate(search(model, torch.arange(3), [[0]] * 3, end=8, max_length=5)):
        expected = model.log_probabilities(code, [0], best[0].tokens)
        assert best[0].log_probabilities == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("no_repeat", [None, 2])
def test_the_steppers_own_tensors_are_left_alone(search, no_repeat):
    class Same(Table):
        def step(self, tokens, state):
            return self.logits[: len(tokens)], state

    model, source, given = Same(9, 0), torch.arange(ROWS), starts()
    before = model.logits.clone(), source.clone(), given.clone()
    search(model, source, given, end=END, max_length=MOST, min_length=4, no_repeat=no_repeat)
    assert all(torch.equal(x, y) for x, y in zip(before, (model.logits, source, given), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_step_gives_logits_in_float32_or_better(dtype):
    logits, state = advance(Table(9, 0, dtype=dtype), torch.tensor([1, 2]), History(torch.tensor([3, 4]), {}))
    assert logits.dtype == (dtype if dtype.itemsize > 4 else torch.float32)
    assert state.code.tolist() == [3 * 31 + 2, 4 * 31 + 3]


def test_a_stepper_reads_without_logits_if_it_can():
    class Reader(Table):
        def read(self, tokens, state):
            return "read"

    tokens, state = torch.tensor([[1, 2]]), History(torch.tensor([3]), {})
    assert read(Reader(9, 0), tokens, state) == "read"
    assert read(Table(9, 0), tokens, state).code.tolist() == [((3 * 31 + 2) * 31 + 3) % Table.size]


def test_a_state_may_lack_rows_and_attention():
    bare = SimpleNamespace()
    assert (rows_of(bare), attention_of(bare)) == (None, {})
    assert (rows_of(SimpleNamespace(rows=len)), attention_of(SimpleNamespace(attention=None))) == (None, {})
    given = SimpleNamespace(rows=0, attention={"cross.0": torch.ones(1)})
    assert (rows_of(given), attention_of(given)) == (0, given.attention)


def tiny_gpt():
    return Gpt(GptConfig(vocabulary=9, length=16, dim=8, depth=1, heads=2))


def test_prefixes_and_sources_go_to_the_device_of_the_model():
    model = tiny_gpt().to("meta")
    assert {device_of(each).type for each in (model, model.watched("self.0"), Ensemble([model]))} == {"meta"}
    assert device_of(Table(9, 0)) is None
    given = TargetPrefix.of([[1, 2], [3]], model)
    assert {x.device.type for x in (given.common, given.rest, given.late)} == {"meta"}
    source = {"source": torch.zeros(2), "rows": [(torch.ones(1), 3)]}
    moved = to_device(source, torch.device("meta"))
    assert moved["source"].is_meta
    assert moved["rows"][0][0].is_meta
    assert moved["rows"][0][1] == 3
    assert to_device(source, None) is source


def marian_shape():
    sizes = {"dim": 8, "heads": 2, "hidden": 12, "encoder_layers": 1, "decoder_layers": 2}
    return Transformer(TransformerConfig(source_vocabulary=9, target_vocabulary=9, start=1, **sizes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("make", "source"),
    [
        (tiny_gpt, torch.tensor([[1, 2], [3, 4]])),
        (marian_shape, {"source": torch.tensor([[1, 2, 3], [3, 4, 0]]), "source_lengths": torch.tensor([3, 2])}),
    ],
)
def test_lists_and_tensors_of_the_host_are_read_by_a_model_on_a_gpu(make, source):
    model = make().double().eval()
    searches = [greedy, partial(sample, seed=1), partial(beam, width=2)]
    want = [search(model, source, [[5], [6]], end=None, max_length=10) for search in searches]
    model.cuda()
    got = [search(model, source, [[5], [6]], end=None, max_length=10) for search in searches]
    assert [[x.tokens for x in flat_once(found)] for found in got] == [
        [x.tokens for x in flat_once(found)] for found in want
    ]


def flat_once(found):
    return [x for best in found for x in (best if isinstance(best, list) else [best])]
