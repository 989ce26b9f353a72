"""parse: the way back from `repr`, by whitelist; whatever else it is given, it refuses without running it."""

import builtins

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import (
    Alibi,
    Causal,
    Chunked,
    Cosine,
    Diagonal,
    Dilated,
    Dot,
    Entmax,
    Global,
    Hard,
    Neighborhood,
    Padding,
    Prefix,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Sparsemax,
    Tapered,
    Window,
    parse,
)

FAST = settings(max_examples=100, derandomize=True, deadline=None)
COUNTS, SIZES = st.integers(0, 2**40), st.integers(1, 2**40)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60)
POSITIVE = st.floats(min_value=1e-300, max_value=1e300) | st.integers(1, 2**60)
LEAVES = st.one_of(
    st.builds(Causal),
    st.builds(Diagonal),
    st.builds(Window, SIZES),
    st.builds(Window, before=COUNTS, after=COUNTS),
    st.builds(Window, st.lists(SIZES, min_size=1, max_size=4)),
    st.builds(Chunked, SIZES),
    st.builds(Dilated, SIZES, st.integers(1, 2**22)),  # a product below 2^63
    st.builds(Neighborhood, st.tuples(*[st.integers(9, 40)] * 2), st.tuples(*[st.integers(1, 9)] * 2)),
    st.builds(Prefix, COUNTS),
    st.builds(Global, COUNTS | st.lists(COUNTS, max_size=4)),
    st.builds(Padding, st.lists(COUNTS, max_size=4)),
)
MASKS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=12,
)
BIASES = st.recursive(
    st.builds(Alibi, st.integers(1, 512)),
    lambda inner: st.builds(lambda a, b: a + b, inner, inner) | st.builds(lambda a, x: x * a, inner, NUMBERS),
    max_leaves=6,
)
SCORES = st.builds(Dot, st.none() | NUMBERS, st.none() | POSITIVE) | st.builds(Cosine, POSITIVE)
NORMALIZERS = st.recursive(
    st.one_of(
        st.builds(Softmax),
        st.builds(Sparsemax),
        st.builds(Hard),
        st.builds(SinkSoftmax, NUMBERS),
        st.builds(Sigmoid, NUMBERS),
        st.builds(Entmax, st.floats(1, 2, exclude_min=True)),
    ),
    lambda inner: st.builds(Tapered, inner, st.builds(Alibi, st.integers(1, 512))),
    max_leaves=3,
)


@FAST
@given(MASKS)
def test_masks_come_back_from_their_repr(mask):
    assert parse(repr(mask)) == mask
    assert repr(parse(repr(mask))) == repr(mask)


@FAST
@given(BIASES)
def test_sums_of_biases_come_back_from_their_repr(bias):
    assert parse(repr(bias)) == bias


@FAST
@given(SCORES)
def test_scores_come_back_from_their_repr(score):
    assert parse(repr(score)) == score


@FAST
@given(NORMALIZERS)
def test_normalizers_come_back_from_their_repr(normalizer):
    assert parse(repr(normalizer)) == normalizer


@pytest.mark.parametrize(
    ("source", "term"),
    [
        ("Causal()&Window( 4 )", Causal() & Window(4)),
        ("  Causal()  ", Causal()),
        ("(Causal())", Causal()),
        ("Causal() |\tPrefix(3)", Causal() | Prefix(3)),
        ("Causal() | Diagonal() & Prefix(3)", Causal() | (Diagonal() & Prefix(3))),
        ("~Causal() & Diagonal()", (~Causal()) & Diagonal()),
        ("Window(width=4)", Window(4)),
        ("Window(None, 3, 0)", Window(before=3, after=0)),
        ("Global([1, 4])", Global((1, 4))),
        ("Global((1, 4,))", Global((1, 4))),
        ("Padding([3])", Padding((3,))),
        ("Dot(scale=None, cap=1e2)", Dot(cap=100.0)),
        ("Sigmoid(-2.5)", Sigmoid(-2.5)),
        ("Alibi(8) + Alibi(heads=8)", Alibi(8) + Alibi(8)),
        ("Tapered(taper=Alibi(2), inner=Softmax())", Tapered(Softmax(), Alibi(2))),
    ],
)
def test_sources_written_by_hand_are_understood(source, term):
    assert parse(source) == term


REFUSED = [
    ("", "not a term"),
    ("   ", "not a term"),
    ("Causal", r"Causal is a class, not a term; write Causal\("),
    ("Causal(", "not a term"),
    ("Causal() Causal()", "not a term"),
    ("Causal() and Window(2)", "not part of a term"),
    ("not Causal()", "not part of a term"),
    ("Causal() if 1 else Diagonal()", "not part of a term"),
    ("Causal() == Causal()", "not part of a term"),
    ("2 * Causal()", r"a number may multiply a bias alone, got Causal\(\)"),
    ("x * Alibi(8)", "arguments of a term must be numbers or terms"),
    ("Bias.of(f)", "Bias.of takes a function, which cannot be parsed"),
    ("Score.of(open)", "Score.of takes a function, which cannot be parsed"),
    (
        "Causal() + Diagonal()",
        r"Causal\(\) and Diagonal\(\) do not combine: masks take &, \|, \^ and -, biases \+ and -",
    ),
    ("Causal() & Alibi(8)", "do not combine"),
    ("Causal() & 1", "not part of a term: 1"),
    ("~Alibi(8)", r"~ takes a mask, got Alibi\(heads=8\)"),
    ("-Causal()", "not part of a term"),
    ("3", "not part of a term"),
    ("(Causal(), Diagonal())", "not part of a term"),
    ("Casual()", "unknown term 'Casual'; did you mean 'Causal'?"),
    ("causal()", "unknown term 'causal'; did you mean 'Causal'?"),
    ("Windw(3)", "unknown term 'Windw'; did you mean 'Window'?"),
    ("zzz()", "unknown term 'zzz'; known: 'Causal', 'Window'"),
    ("Causal(1)", "Causal: .*positional argument"),
    ("Window(size=3)", "Window: .*unexpected keyword argument 'size'"),
    ("Window(3, width=3)", "Window: .*multiple values"),
    ("Dilated(3)", "Dilated: .*missing"),
    ("Window(-3)", "Window width must be 1 or more, got -3"),
    ("Window('3')", "arguments of a term must be numbers or terms, got '3'"),
    ("Window(b'3')", "arguments of a term must be numbers or terms"),
    ("Window(3j)", "arguments of a term must be numbers or terms, got 3j"),
    ("Window(1 + 1)", "not part of a term: 1"),
    ("Window(...)", "arguments of a term must be numbers or terms"),
    ("Window(--3)", "arguments of a term must be numbers or terms"),
    ("Window(True)", "Window: Window width must be a whole number, got True"),
    ("Prefix(inf)", "arguments of a term must be numbers or terms, got inf"),
    ("Entmax(1e999)", "Entmax alpha must be finite, got inf"),
    ("Dot(1e999)", "Dot scale must be finite, got inf"),
    ("Dot(-1e999)", "Dot scale must be finite, got -inf"),
    ("Cosine(1e999)", "Cosine temperature must be finite, got inf"),
    ("Dot((1, 2))", r"Dot scale must be a number, got \(1, 2\)"),
    ("Dot(True)", "Dot scale must be a number, got True"),
    ("SinkSoftmax(None)", "SinkSoftmax sink must be a number, got None"),
    ("Sigmoid(())", r"Sigmoid bias must be a number, got \(\)"),
    ("Window(Causal())", r"Window width must be a whole number, got Causal\(\)"),
    ("Global((Causal(),))", r"Global tokens must be a whole number, got Causal\(\)"),
    ("Tapered(Softmax, Alibi(2))", "arguments of a term must be numbers or terms, got Softmax"),
    ("Tapered(Softmax(), Causal())", "Tapered takes a normalizer and a bias, got Softmax.* and Causal"),
    ("Window(*[3])", "arguments of a term must be numbers or terms"),
    ("Window(before=1, before=2, after=0)", r"Window takes each argument once.*; got Window\(before=1, before=2"),
    ("Window(**{'width': 3})", r"Window takes each argument once, and no \*\*; got"),
    ("Padding(torch.tensor([3, 5]))", r"not part of a term: torch\.tensor"),
    ("Padding(int64[2])", r"arguments of a term must be numbers or terms, got int64\[2\]"),
    ("Dense(bool[5, 7])", "Dense holds tensors or functions, which cannot be parsed from text; build it in Python"),
    ("Documents(int64[5])", "Documents holds tensors or functions"),
    ("Near(float32[5], 2)", "Near holds tensors or functions"),
    ("Causal() & ~Dense(bool[5, 7])", "Dense holds tensors or functions"),
    ("Tapered(Softmax(), Gaussian(float32[5], 2.0))", "Gaussian holds tensors or functions"),
    ("Rule(print)", "Rule holds tensors or functions"),
    ("Term()", "unknown term 'Term'"),
    ("And(Causal(), Causal())", "unknown term 'And'"),
    ("Causal()\0", "not a term"),
    ("Causal()\nCausal()", "not a term"),
    ("Causal(); Causal()", "not a term"),
    ("x = Causal()", "not a term"),
    ("import os", "not a term"),
    ("Window(" + "9" * 5000 + ")", "at most 2000 characters long, got 5008"),
    ("(" * 3000 + "Causal()" + ")" * 3000, "at most 2000 characters long, got 6008"),
    ("Causal()" + " " * 1993, "at most 2000 characters long, got 2001"),
    ("(" * 300 + "Causal()" + ")" * 300, "not a term"),
    ("|".join("x" * 1000), "nested too deeply"),
    ("~" * 800 + "Causal()", "at most 100 terms and ~"),
    ("~" * 100 + "Causal()", "at most 100 terms and ~"),
    (" & ".join(["Causal()"] * 101), "at most 100 terms and ~"),
]
HOSTILE = [
    "canary()",
    "Causal(canary())",
    "Window(width=canary())",
    "Window(*canary())",
    "Window(**canary())",
    "Causal() & canary()",
    "~canary()",
    "Causal().draw(canary())",
    "Causal().__class__.__init__(canary())",
    "(lambda: canary())()",
    "Causal(lambda: canary())",
    "[canary() for _ in (1,)]",
    "Global((canary(),))",
    "Global([canary() for _ in (1,)])",
    "Global({canary()})",
    "Global({1: canary()})",
    "f'{canary()}'",
    "Causal(f'{canary()}')",
    "(Causal(), canary())[0]",
    "Causal()[canary()]",
    "Causal() if canary() else Causal()",
    "canary() or Causal()",
    "Causal() if (x := canary()) else Causal()",
    "(yield canary())",
    "await canary()",
    "__import__('builtins').canary()",
    "__builtins__.canary()",
    "Padding(__import__('builtins').canary())",
    "getattr(Causal, '__init__')(canary())",
    "Causal.__init__.__globals__['__builtins__']['canary']()",
    "exec('canary()')",
    "eval('canary()')",
    "Rule(canary)",
    "Window(3, after=exec('canary()'))",
]


@pytest.mark.parametrize(("source", "message"), REFUSED, ids=[source[:40] for source, _ in REFUSED])
def test_invalid_sources_are_refused(source, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(source)
    assert not isinstance(caught.value, SyntaxError)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("source", HOSTILE)
def test_code_is_refused_and_never_runs(source, monkeypatch):
    ran = []
    monkeypatch.setattr(builtins, "canary", lambda *_: ran.append(source) or (), raising=False)
    with pytest.raises(
        ValueError, match=r"not a term|part of a term|arguments of a term|unknown term|argument once|holds"
    ):
        parse(source)
    assert not ran


@FAST
@given(st.text(max_size=40) | st.text(alphabet="CausalWindow()&|~+ ,123.=*'[]", max_size=40))
def test_any_text_is_a_term_or_a_value_error(source):
    try:
        term = parse(source)
    except ValueError:
        return
    assert parse(repr(term)) == term


@pytest.mark.parametrize(
    "source",
    [
        "~" * 99 + "Causal()",
        " & ".join(["Causal()"] * 100),
        " | ".join(["~Causal()"] * 50),
        "Causal() & (" * 98 + "Causal() & Causal()" + ")" * 98,
        "Tapered(" * 49 + "Softmax()" + ", Alibi(heads=2))" * 49,
    ],
    ids=["not", "and", "or", "right", "tapered"],
)
def test_the_largest_terms_that_parse_can_also_be_shown_and_hashed(source):
    term = parse(source)
    assert repr(term) == source
    assert term == parse(source)
    assert hash(term) == hash(parse(source))
    assert term.tensors() == []


def test_spaces_count_towards_the_longest_source():
    assert parse("Causal()" + " " * 1992) == Causal()


@pytest.mark.parametrize("source", ["(" * 3000 + "Causal()" + ")" * 3000, "~" * 800 + "Causal()"], ids=["(", "~"])
def test_the_message_about_a_long_source_is_short(source):
    with pytest.raises(ValueError, match="a term must be") as caught:
        parse(source)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("source", [None, 3, b"Causal()", Causal()], ids=["none", "int", "bytes", "term"])
def test_only_strings_are_parsed(source):
    with pytest.raises(TypeError, match="parse takes a string, got"):
        parse(source)
