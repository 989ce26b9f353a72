"""The caller says which dims are the batch and which the heads."""

import pytest
import torch
from torch import nn

from regard.lens import CaptureWarning, Tape, ablate, ablation_importance, capture, importance
from regard.lens.eager.given_layout import NO_LAYOUTS, GivenLayout, GivenLayouts
from tests.lens.eager.written_out import close

H, N, D = 2, 5, 3


@pytest.mark.parametrize(
    ("text", "heads", "at", "is_folded", "is_batch"),
    [
        ("b h i j", None, 1, False, False),
        ("h b i j", None, 0, False, False),
        ("(b h) i j", None, 1, True, False),
        ("(h b) i j", None, 0, True, False),
        ("(b h=4) i j", 4, 1, True, False),
        ("(h=4 b) i j", 4, 0, True, False),
        ("  (b h)  i j ", None, 1, True, False),
        ("b i j", None, 1, False, True),
    ],
)
def test_a_layout_says_where_the_heads_are(text, heads, at, is_folded, is_batch):
    layout = GivenLayout.parse(text)
    assert (layout.heads, layout.at, layout.is_folded, layout.is_batch) == (heads, at, is_folded, is_batch)
    assert repr(layout) == repr(" ".join(text.split()))


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        ("b h j i", ValueError, r"a layout is one of 'b h i j', .*, got 'b h j i'"),
        ("(b h=0) i j", ValueError, r"the number of heads must be at least 1, got '\(b h=0\) i j'"),
        (3, TypeError, "a layout is one of .*, got 3"),
        ({3: "b i j"}, TypeError, "the keys of layout must be patterns of layer names, got 3"),
        ({"a": 3}, TypeError, "got 3"),
        ({"other.*": "b i j"}, ValueError, r"no layer matches 'other.\*' of layout; there are \(model\), a, b"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(layout, error, message):
    with pytest.raises(error, match=message):
        GivenLayouts.parse(layout, ["", "a", "b"])


def test_the_last_pattern_that_matches_a_layer_applies():
    layouts = GivenLayouts.parse({"*": "b i j", "a.*": "(b h) i j"}, ["a.0", "b.0"])
    assert layouts.of("a.0") == GivenLayout.parse("(b h) i j")
    assert layouts.of("b.0") == GivenLayout.parse("b i j")
    assert NO_LAYOUTS.of("a.0") is None


class Folded(nn.Module):
    """Gets its heads in the batch from a place that nobody sees, and says how many there are."""

    def __init__(self, heads=H):
        super().__init__()
        self.num_heads, self.out = heads, nn.Linear(D, D)

    def forward(self, parts):
        q, k, v = parts
        weights = (q @ k.mT).softmax(-1)
        self.found = weights.detach().unflatten(0, (-1, self.num_heads))
        return self.out(weights @ v)


def parts(texts=3, heads=H):
    return [torch.randn(texts * heads, N, D) for _ in range(3)]


def seen(model, x, **options):
    with capture(model, **options) as tape, torch.no_grad():
        model(x)
    return tape


def test_heads_that_nothing_shows_are_guessed_and_the_tape_says_so(tmp_path):
    model, x = nn.Sequential(Folded()), parts()
    tape = seen(model, x)
    assert tape["0"].shape == (6, 1, N, N)
    assert list(tape.guessed) == ["0"]
    assert "its 6 matrices are taken for 6 texts with one head each" in tape.guessed["0"]
    assert repr(tape).splitlines()[-1].startswith("0: batch and heads guessed, its 6 matrices")
    tape.save(tmp_path / "tape.safetensors")
    assert Tape.load(tmp_path / "tape.safetensors").guessed == tape.guessed == tape.select("0").guessed


@pytest.mark.parametrize("layout", ["(b h) i j", {"0": "(b h=2) i j"}, {"*": "b i j", "0": "(b h) i j"}])
def test_a_given_layout_is_no_guess(layout):
    model = nn.Sequential(Folded())
    tape = seen(model, parts(), layout=layout)
    assert not tape.guessed
    close(tape["0"], model[0].found)


def test_a_given_layout_is_that_of_a_kernel_call_too():
    class Kernel(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(*x)

    q, k, v = (torch.randn(2, 3, N, D) for _ in range(3))
    truth = torch.softmax(q @ k.mT * D**-0.5, -1)
    with torch.no_grad():
        close(seen(Kernel(), (q, k, v))[""], truth)
        close(seen(Kernel(), (q, k, v), layout="h b i j")[""], truth.transpose(0, 1))
        close(seen(Kernel(), (q, k, v), layout="b i j")[""], truth.flatten(0, 1)[:, None])


def test_a_layout_that_does_not_fit_leaves_the_layer_out():
    model = nn.Sequential(Folded(), Folded())

    def run():
        with torch.no_grad():
            model[0](x)
            model[1](x)

    x = parts()
    with (
        pytest.warns(CaptureWarning, match="1 was not recorded: layout='b h i j' has two batch dims"),
        capture(model, layout={"0": "(b h) i j", "1": "b h i j"}) as tape,
    ):
        run()
    assert tape.layers == ["0"]
    assert [(each.layer, each.kind) for each in tape.unseen] == [("1", "attention")]


def test_heads_that_are_a_guess_are_not_silenced():
    model, x = nn.Sequential(Folded()), [part.requires_grad_() for part in parts()]
    message = r"it is a guess which dims of '0' are its heads: .*; pass layout=\{'0': '\(b h\) i j'\}"
    with pytest.raises(ValueError, match=message), ablate(model, {"0": [0]}):
        model(x)
    with pytest.raises(ValueError, match=message), importance(model):
        model(x).sum().backward()
    with pytest.raises(ValueError, match=message), torch.no_grad():
        ablation_importance(model, lambda: model(x).sum(), layers=["0"])


def test_heads_of_a_given_layout_are_silenced():
    model, x, layout = nn.Sequential(Folded()), parts(), {"0": "(b h) i j"}
    with torch.no_grad():
        before = model(x)
        with ablate(model, {"0": [1]}, layout=layout):
            after = model(x)
        assert torch.equal(after[::2], before[::2])
        torch.testing.assert_close(after[1::2], model[0].out.bias.expand_as(after[1::2]))
        assert ablation_importance(model, lambda: model(x).sum(), layout=layout)["0"].shape == (H,)
    with importance(model, layout=layout) as scores:
        model([part.requires_grad_() for part in x]).sum().backward()
    assert scores["0"].shape == (H,)
