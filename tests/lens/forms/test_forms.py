"""Capture does with each form of attention what the tables in README.md and docs say, as float64 runs of it show."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

import tests.lens.graph_layers as graphs
from regard import Causal
from regard.lens import CaptureWarning, KernelCall, capture, register_kernel
from regard.lens.interception.known_mixers import KNOWN

from .form import AUDIT, CHANGED, REFUSED, SEEN, TERMS, WEIGHTS, Form, by, kept, softmax_of_dots
from .left_out import CLASSES, MIXERS, wrong_kernel
from .seen import COMPILED as COMPILED_MODELS
from .seen import TRANSFORMERS, own_kernel
from .tables import BEGIN, END, FORMS, PAGES, replaced, short_table, whole_table

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CLOSE = 2e-5
EXAMPLES = [pytest.param(form, build, id=f"{form.name}-{n}") for form in FORMS for n, build in enumerate(form.examples)]


@pytest.fixture
def graph_libraries(monkeypatch):
    graphs.install(monkeypatch)


@pytest.fixture
def registered_kernels():
    """A kernel of the user that does what its call says, and one that sees all keys and not those before."""
    with (
        register_kernel(own_kernel, lambda q, k, v: KernelCall(q=q, k=k, v=v), output="b h i e"),
        register_kernel(wrong_kernel, lambda q, k, v: KernelCall(q=q, k=k, v=v, mask=Causal()), output="b h i e"),
    ):
        yield


@pytest.fixture(autouse=True)
def dynamo():
    yield
    torch._dynamo.reset()


def run(example, **options):
    """The tape of a model, whose output is that without capture, to the bit."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        want = example.model(*example.inputs)
        with capture(example.model, **options) as tape:
            got = example.model(*example.inputs)
    assert all(torch.equal(x, y) for x, y in zip(outputs(got), outputs(want), strict=True))
    return tape


def outputs(returned):
    if torch.is_tensor(returned):
        return [returned]
    found = returned.values() if hasattr(returned, "values") else returned
    return [x for x in found if torch.is_tensor(x)]


def assert_shows(tape, form, example):
    truth = example.truth()
    assert len(tape) == len(truth) > 0
    for A, exact in zip(tape.values(), truth, strict=True):
        found = A.dense()
        assert found.shape[-3:] == exact.shape[-3:]
        assert (found.double() - exact).abs().max() < CLOSE
        assert kept(A) == form.shown
    assert tape.unseen == []
    assert bool(tape.changed) == (form.outcome == CHANGED)
    assert tape.guessed == {}


@pytest.mark.parametrize(("form", "build"), EXAMPLES)
def test_capture_does_what_the_table_says(form, build, request):
    if form.library is not None:
        request.getfixturevalue(form.library)
    assert_holds(form, build())


COMPILED = [
    pytest.param(form, form.examples[0], id=form.name)
    for form in FORMS
    if form.outcome not in (AUDIT, REFUSED)
    and form.family not in (MIXERS, TRANSFORMERS, COMPILED_MODELS)
    and form.library != "registered_kernels"  # theirs call NumPy, and what the compiler makes of it rounds otherwise
]


@pytest.mark.compiled
@pytest.mark.parametrize(("form", "build"), COMPILED)
def test_a_compiled_form_is_seen_or_listed_as_the_form_is(form, build, request):
    if form.library is not None:
        request.getfixturevalue(form.library)
    example = build()
    example.model = torch.compile(example.model, backend="eager")
    assert_holds(form, example)


def assert_holds(form, example):
    if form.outcome == REFUSED:
        with pytest.raises(TypeError, match=form.shown), capture(example.model):
            example.model(*example.inputs)
        return
    tape = run(example, audit=form.outcome == AUDIT)
    if form.outcome in (SEEN, CHANGED):
        assert_shows(tape, form, example)
        return
    assert tape.layers == ["seen"]
    assert {each.layer.split(".")[0] for each in tape.unseen} == {"other"}
    assert form.shown in {each.kind for each in tape.unseen}
    if form.outcome == AUDIT:
        assert run(example).unseen == []


@pytest.mark.parametrize(("path", "table"), PAGES.items(), ids=lambda x: getattr(x, "name", ""))
def test_a_page_holds_the_table_of_the_list(path, table):
    text = path.read_text(encoding="utf8")
    assert replaced(text, table(FORMS)) == text, "write it anew: python -m tests.lens.forms.tables"


def test_a_row_that_is_not_so_fails():
    form = Form(name="", family="", outcome=SEEN, shown=TERMS, examples=[])
    assert_holds(form, by(lambda q, k, v: softmax_of_dots(q, k) @ v)())
    for wrong in (
        (form, by(lambda q, k, v: softmax_of_dots(q, k) @ v, lambda q, k: (q @ k.mT).softmax(-1))),
        (SimpleNamespace(outcome=SEEN, shown=WEIGHTS), by(lambda q, k, v: softmax_of_dots(q, k) @ v)),
        (SimpleNamespace(outcome=CHANGED, shown=TERMS), by(lambda q, k, v: softmax_of_dots(q, k) @ v)),
        (form, by(lambda q, k, v: softmax_of_dots(q, k) * 0.5 @ v, lambda q, k: softmax_of_dots(q, k) * 0.5)),
    ):
        with pytest.raises(AssertionError):
            assert_holds(wrong[0], wrong[1]())


def test_a_page_without_marks_is_refused():
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb", "new\n") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb"
    with pytest.raises(ValueError, match="must hold the lines"):
        replaced("a", "new")


def test_every_known_kind_of_mixer_has_a_row():
    assert {each.kind for each in KNOWN} == set(CLASSES)


def test_tables_have_a_row_for_each_form_or_outcome():
    form = Form(name="a", family="b", outcome=SEEN, shown="c", examples=[])
    assert whole_table([form]).splitlines()[2:] == ["| a | seen | c |"]
    assert "| seen | b |" in short_table([form]).splitlines()
