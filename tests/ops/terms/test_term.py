"""What every term is: a frozen value that compares by value, or by identity where it holds a tensor."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from regard import (
    Added,
    Additive,
    Alibi,
    Bilinear,
    Blocks,
    Causal,
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
    attend,
    parse,
)
from regard.ops.terms.masks import Mask
from regard.ops.terms.term import term

PLAIN = {
    "Causal()": lambda: Causal(),
    "Window(4)": lambda: Window(4),
    "Window(before=3, after=0)": lambda: Window(before=3, after=0),
    "Dilated(2, 3)": lambda: Dilated(2, 3),
    "Diagonal()": lambda: Diagonal(),
    "Prefix(5)": lambda: Prefix(5),
    "Global(2)": lambda: Global(2),
    "Global((1, 4))": lambda: Global([1, 4]),
    "Global((0, 1, 2))": lambda: Global(range(3)),
    "Padding((3, 5))": lambda: Padding([3, 5]),
    "Alibi(heads=8)": lambda: Alibi(8),
    "Alibi(heads=8) + Alibi(heads=4)": lambda: Alibi(8) + Alibi(4),
    "Dot()": lambda: Dot(),
    "Dot(scale=0.5)": lambda: Dot(0.5),
    "Dot(scale=0.5, cap=30.0)": lambda: Dot(0.5, 30.0),
    "Dot(cap=30.0)": lambda: Dot(cap=30.0),
    "Cosine()": lambda: Cosine(1.0),
    "Cosine(temperature=0.1)": lambda: Cosine(0.1),
    "Softmax()": lambda: Softmax(),
    "SinkSoftmax(0.0)": lambda: SinkSoftmax(0.0),
    "Sigmoid()": lambda: Sigmoid(),
    "Sigmoid(bias=-2.5)": lambda: Sigmoid(-2.5),
    "Sparsemax()": lambda: Sparsemax(),
    "Entmax()": lambda: Entmax(),
    "Entmax(alpha=1.25)": lambda: Entmax(1.25),
    "Hard()": lambda: Hard(),
    "Tapered(Softmax(), Alibi(heads=2))": lambda: Tapered(Softmax(), Alibi(2)),
    "Causal() & ~Diagonal()": lambda: Causal() & ~Diagonal(),
}


def ones(*shape):
    return torch.ones(*shape)


def flags(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def ids(*shape):
    return torch.ones(*shape, dtype=torch.long)


HOLDING = {
    "Prefix(int64[2])": lambda: Prefix(ids(2)),
    "Global(int64[2, 3])": lambda: Global(ids(2, 3)),
    "Near(float32[5], 2)": lambda: Near(ones(5), 2),
    "Padding(int64[2])": lambda: Padding(ids(2)),
    "Padding(bool[2, 5])": lambda: Padding(flags(2, 5)),
    "Documents(int64[5])": lambda: Documents(ids(5)),
    "Documents(int64[5], key_ids=int64[7])": lambda: Documents(ids(5), ids(7)),
    "Blocks(bool[2, 3], 16)": lambda: Blocks(flags(2, 3), 16),
    "Dense(bool[5, 7])": lambda: Dense(flags(5, 7)),
    "Alibi(slopes=float32[4])": lambda: Alibi(slopes=ones(4)),
    "Relative(Logarithmic(32), table=float32[8, 32])": lambda: Relative.t5(ones(8, 32)),
    "Relative(Clipped(8), keys=float32[17, 64], scale=1.0)": lambda: Relative.shaw(ones(17, 64), scale=1.0),
    "Gaussian(float32[5], 2.0)": lambda: Gaussian(ones(5), 2.0),
    "Added(float32[5, 7])": lambda: Added(ones(5, 7)),
    "Dot(scale=float32[])": lambda: Dot(torch.tensor(1.0)),
    "Dot(scale=float16[4], cap=9.0)": lambda: Dot(ones(4).half(), 9.0),
    "Cosine(temperature=float32[4])": lambda: Cosine(ones(4)),
    "Bilinear(float32[8, 6])": lambda: Bilinear(ones(8, 6)),
    "Additive(float64[8])": lambda: Additive(ones(8).double()),
    "Location(float32[9, 8])": lambda: Location(ones(9, 8)),
    "SinkSoftmax(bfloat16[4])": lambda: SinkSoftmax(ones(4).bfloat16()),
    "Sigmoid(bias=float32[4])": lambda: Sigmoid(ones(4)),
    "Tapered(Softmax(), Gaussian(float32[5], 2.0))": lambda: Tapered(Softmax(), Gaussian(ones(5), 2.0)),
    "Causal() & ~Padding(int64[2])": lambda: Causal() & ~Padding(ids(2)),
    "Alibi(heads=4) + Added(float32[5, 7])": lambda: Alibi(4) + Added(ones(5, 7)),
}
BOTH = {**PLAIN, **HOLDING}


def cases(table):
    return pytest.mark.parametrize(("source", "make"), table.items(), ids=list(table))


@cases(BOTH)
def test_repr_is_the_source_with_tensors_as_dtype_and_shape(source, make):
    assert repr(make()) == source


@cases(PLAIN)
def test_terms_of_numbers_are_equal_by_value_and_hash_alike(source, make):
    assert make() is not make()
    assert make() == make()
    assert hash(make()) == hash(make())
    assert {make(): source}[make()] == source


@cases(HOLDING)
def test_terms_of_tensors_are_equal_to_themselves_only(source, make):
    one, other = make(), make()
    assert one.__eq__(one) is True
    assert one.__eq__(other) is False
    assert one != one.map_tensors(lambda x: x)
    assert len({one, other, one}) == 2
    assert {one: source}.get(other) is None


def test_terms_of_the_same_tensor_are_still_two():
    lengths = ids(2)
    assert Padding(lengths) != Padding(lengths)


def test_different_plain_terms_are_unequal():
    for one, other in itertools.combinations([make() for make in PLAIN.values()], 2):
        assert one != other, (one, other)
        assert len({one, other}) == 2


def test_a_term_is_not_its_values_nor_a_term_of_another_class():
    assert Window(4) != 4
    assert Softmax() != Sparsemax()
    assert Causal() & Diagonal() != Causal() | Diagonal()
    assert Causal() & Diagonal() != Diagonal() & Causal()
    assert Dilated(3, 1) != Dilated(1, 3)


@pytest.mark.parametrize(
    ("plain", "holding"),
    [
        (Prefix(2), Prefix(torch.tensor([2]))),
        (Prefix(2), Prefix(torch.tensor([2, 3]))),
        (Dot(1.0), Dot(torch.tensor(1.0))),
        (Causal() & Global(1), Causal() & Global(torch.tensor([1, 1]))),
    ],
    ids=repr,
)
def test_a_term_of_numbers_never_equals_one_of_tensors(plain, holding):
    assert holding != plain
    assert plain != holding


def test_rules_are_equal_when_their_function_is_the_same():
    def ahead(b, h, i, j):
        return j >= i

    assert Rule(ahead) == Rule(ahead)
    assert Rule(ahead) != Rule(lambda b, h, i, j: j >= i)
    assert repr(Rule(ahead)) == "Rule(ahead)"


@cases(BOTH)
def test_terms_are_frozen(source, make):
    term = make()
    for name in [field.name for field in dataclasses.fields(term)] + ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(term, name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del term.anything
    assert repr(term) == source


@cases(PLAIN)
def test_a_term_of_numbers_has_no_tensors_and_maps_to_itself(source, make):
    term = make()
    assert term.tensors() == []
    assert term.map_tensors(lambda x: pytest.fail(f"asked for {x}")) is term


@cases(HOLDING)
def test_map_tensors_visits_in_the_order_of_tensors_and_leaves_the_original(source, make):
    term = make()
    before, seen = term.tensors(), []
    after = term.map_tensors(lambda x: seen.append(x) or x.clone())
    assert len(before) >= 1
    assert all(a is b for a, b in zip(seen, before, strict=True))
    assert all(a is b for a, b in zip(term.tensors(), before, strict=True))
    assert not any(a is b for a, b in zip(after.tensors(), before, strict=True))
    assert type(after) is type(term)
    assert repr(after) == source


def test_tensors_come_in_the_order_the_term_is_written():
    a, b, c, d = (ids(n) for n in (2, 3, 4, 5))
    mask = (Prefix(a) | ~Padding(b)) & (Causal() | Documents(c, d))
    assert all(x is y for x, y in zip(mask.tensors(), (a, b, c, d), strict=True))
    center, sigma = ones(5), ones(1)
    taper = Tapered(SinkSoftmax(a), Gaussian(center, sigma))
    assert all(x is y for x, y in zip(taper.tensors(), (a, center, sigma), strict=True))


A, B, C = Causal(), Diagonal(), Window(2)
PRECEDENCE = [
    (A & B & C, "Causal() & Diagonal() & Window(2)"),
    (A & (B & C), "Causal() & (Diagonal() & Window(2))"),
    (A | B | C, "Causal() | Diagonal() | Window(2)"),
    (A | (B | C), "Causal() | (Diagonal() | Window(2))"),
    (A | B & C, "Causal() | Diagonal() & Window(2)"),
    (A & B | C, "Causal() & Diagonal() | Window(2)"),
    ((A | B) & C, "(Causal() | Diagonal()) & Window(2)"),
    (A & (B | C), "Causal() & (Diagonal() | Window(2))"),
    (~A & B, "~Causal() & Diagonal()"),
    (~(A & B), "~(Causal() & Diagonal())"),
    (~(A | B), "~(Causal() | Diagonal())"),
    (~~A, "~~Causal()"),
    (~(~A | B) & ~C, "~(~Causal() | Diagonal()) & ~Window(2)"),
    (Alibi(1) + Alibi(2) + Alibi(4), "Alibi(heads=1) + Alibi(heads=2) + Alibi(heads=4)"),
    (Alibi(1) + (Alibi(2) + Alibi(4)), "Alibi(heads=1) + (Alibi(heads=2) + Alibi(heads=4))"),
]


@pytest.mark.parametrize(("term", "source"), PRECEDENCE, ids=[source for _, source in PRECEDENCE])
def test_repr_writes_the_parentheses_that_python_needs_and_no_others(term, source):
    assert repr(term) == source
    assert parse(source) == term


@pytest.mark.parametrize("number", [np.float64(0.125), np.float32(0.125)], ids=repr)
def test_numpy_numbers_show_as_python_numbers(number):
    assert repr(Dot(number)) == "Dot(scale=0.125)"
    assert parse(repr(Dot(number))) == Dot(0.125) == Dot(number)


def test_the_terms_of_the_library_are_final():
    with pytest.raises(TypeError, match=r"Causal cannot be subclassed: .*; write class Strict\(Mask\)"):

        @term
        class Strict(Causal):
            def over(self, at):
                return at.j < at.i

    with pytest.raises(TypeError, match=r"write class Off\(Normalizer\)"):

        class Off(Softmax):
            pass


def test_terms_of_ones_own_are_not():
    @term
    class Mine(Mask):
        n: int = 1

        def over(self, at):
            return at.j < at.i

    @term
    class Other(Mine):
        def over(self, at):
            return at.j == at.i

    q, k, v = torch.randn(3, 1, 2, 50, 8)
    for name in (None, "reference"):
        assert torch.equal(attend(q, k, v, mask=Other(), backend=name), v)
