"""Every term as JSON and back; nothing but known terms is rebuilt."""

import json

import pytest
import torch

from regard import (
    Added,
    Additive,
    Alibi,
    Bilinear,
    Blocks,
    Causal,
    Chunked,
    Cosine,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Dot,
    Entmax,
    Gaussian,
    Global,
    Hard,
    Location,
    Near,
    Neighborhood,
    Padding,
    Prefix,
    Relative,
    Rule,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Sparsemax,
    Tapered,
    Window,
    weights,
)
from regard.lens import Tape
from regard.lens.tape.term_json import TERMS, TensorBox, check_fields, evaluate_functions, from_json, to_json
from regard.lens.terms.infer_mask import Packed
from regard.ops.terms.biases import Bias
from regard.ops.terms.term import term

B, H, I, J, D = 2, 4, 5, 7, 8


def some(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


CASES = [
    {"mask": Neighborhood((1, I), (1, 3))},
    {"mask": Causal() & Chunked(3) & Window((1, 4, 2, 9)[:H])},
    {"bias": 2 * Alibi(H) - some(I, J)},
    {"bias": some(H) * Alibi(H), "mask": Causal() - Diagonal()},
    {"mask": Causal() & Window(3) | ~Diagonal() & Prefix(2)},
    {"mask": Dilated(2, 3) | Global((0, 3)) | Window(before=1, after=2)},
    {"mask": Padding((4, 7)) & Prefix(torch.tensor([3, 6])) & Global(torch.tensor([[0, 2], [1, 5]]))},
    {"mask": Padding(some(B, J) > -1) & Near(some(B, H, I), 2.5)},
    {"mask": Documents(torch.arange(I) // 2, torch.arange(J) // 2)},
    {"mask": Blocks(some(3, 3) > -0.5, (2, 3))},
    {"mask": Blocks(some(3, 4) > -0.5, 2) & Dense(some(B, 1, I, J) > -1)},
    {"bias": Alibi(H) + Relative.t5(some(H, 32)), "normalize": SinkSoftmax(0.5)},
    {"bias": Alibi(slopes=some(H)) + Relative.shaw(some(5, D)), "normalize": SinkSoftmax(some(H))},
    {"bias": Gaussian(some(B, H, I), 2.0) + Added(some(1, H, I, J)), "score": Dot(scale=some(H), cap=3.0)},
    {"score": Cosine(0.5), "normalize": Sparsemax()},
    {"score": Additive(some(D)), "normalize": Entmax(1.25)},
    {"score": Bilinear(some(D, D)), "normalize": Sigmoid(-1.0)},
    {"score": Location(some(J, D)), "normalize": Hard()},
    {"normalize": Tapered(Softmax(), Gaussian(some(B, H, I), 1.5)), "offset": 1},
    {"mask": Causal(), "offset": 0},
]


@pytest.mark.parametrize("terms", CASES, ids=[str(n) for n in range(len(CASES))])
def test_every_term_survives_a_file(terms, tmp_path):
    A = weights(some(B, H, I, D), some(B, 2, J, D).roll(1, 0), **terms)
    Tape({("x", 0): A}).save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")["x"]
    assert repr(again) == repr(A)
    assert torch.equal(again.dense(), A.dense())
    assert torch.equal(again.distance(), A.distance())


def test_every_public_term_without_a_function_is_in_the_table():
    import regard

    public = [getattr(regard, name) for name in regard.__all__]
    terms = {x.__name__ for x in public if isinstance(x, type) and issubclass(x, regard.ops.terms.term.Term)}
    assert terms - TERMS.keys() == {"Rule", "Bias", "Mask", "Normalizer", "Score"}  # functions, and base classes


def test_biases_of_functions_are_not_saved(tmp_path):
    A = weights(some(B, H, I, D), some(B, 2, J, D), bias=Bias.of(lambda b, h, i, j: i - j))
    with pytest.raises(ValueError, match=r"Bias.of\(<lambda>\) cannot be saved: tape files have no term"):
        Tape({("x", 0): A}).save(tmp_path / "tape.safetensors")


def test_masks_with_functions_are_saved_as_bits(tmp_path):
    q, k = some(B, H, I, D), some(B, 2, J, D).roll(1, 0)
    A = weights(q, k, mask=Causal() & Rule(lambda b, h, i, j: (i + j + h) % 3 < 2))
    Tape({("x", 0): A}).save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")["x"]
    assert isinstance(again._call.mask, Packed)
    assert torch.equal(again.dense(), A.dense())


@pytest.mark.parametrize("terms", CASES, ids=[str(n) for n in range(len(CASES))])
def test_every_term_is_plain_json_and_comes_back(terms):
    box = TensorBox()
    sources = {name: to_json(term, box) for name, term in terms.items()}
    again = {name: from_json(source, box.tensors) for name, source in json.loads(json.dumps(sources)).items()}
    assert repr(again) == repr(terms)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"term": "Rule", "fn": "print"}, "unknown term 'Rule'; known are Causal, Window"),
        ({"term": ["Causal"]}, "unknown term"),
        ({"fields": 3}, "unknown term None"),
        ({"term": "Prefix"}, "Prefix must have the fields n, got "),
        ({"term": "Prefix", "n": 2, "more": 3}, "Prefix must have the fields n, got n, more"),
        ({"tensor": "t1"}, "the file has no tensor 't1'"),
        ({"tensor": 0}, "the file has no tensor 0"),
        ([{"tensor": "t1"}], "the file has no tensor 't1'"),
    ],
)
def test_other_json_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        from_json(source, {"t0": torch.zeros(1)})


def test_fields_are_those_of_an_object():
    check_fields("entry", {"a": 1, "b": 2}, "a", "b")
    with pytest.raises(ValueError, match="entry must have the fields a, b, got list"):
        check_fields("entry", [1], "a", "b")


def test_a_tensor_is_boxed_once_and_memory_is_never_shared():
    box, x = TensorBox(), torch.arange(6.0)
    assert box.add(x) == box.add(x) == "t0"
    assert box.add(x[:3]) == "t1"  # a view of the same memory
    first, second = box.tensors.values()
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert torch.equal(second, x[:3])


def test_a_term_that_is_no_mask_and_not_in_the_table_cannot_be_saved():
    @term
    class Own(Bias):
        def over(self, at):
            return at.i * 0.0

    A = weights(some(B, H, I, D), some(B, H, J, D))
    with pytest.raises(ValueError, match=r"cannot be saved: tape files have no term Own"):
        evaluate_functions(Own(), A)
    assert evaluate_functions(None, A) is None
    assert evaluate_functions(Causal(), A) is not None
