"""The diagrams of the book: each file is what its code draws, and the numbers in it are those of plain PyTorch."""

from __future__ import annotations

import importlib
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import pytest
import torch
from torch.testing import assert_close

ROOT = Path(__file__).parents[1]
CODE, IMAGES, BOOK = ROOT / "docs" / "diagrams", ROOT / "docs" / "images" / "diagrams", ROOT / "docs" / "book"
NAMES = sorted(path.stem for path in CODE.glob("*.py") if path.stem not in ("__main__", "drawing"))

pytestmark = pytest.mark.chapters


@pytest.fixture
def diagram(monkeypatch):
    """Return a function that imports a diagram by its name."""
    monkeypatch.syspath_prepend(CODE)

    def imported(name: str) -> ModuleType:
        return importlib.import_module(name)

    return imported


def shown(svg: str) -> list[str]:
    """The words of a drawing, which matplotlib writes as comments beside their outlines."""
    return re.findall(r"<!-- (.*?) -->", svg, flags=re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_a_diagram_is_what_its_code_draws_and_stands_in_a_chapter(name, diagram, tmp_path):
    diagram("drawing").save(diagram(name).draw(), tmp_path / f"{name}.svg")
    now, committed = ((folder / f"{name}.svg").read_text(encoding="utf8") for folder in (tmp_path, IMAGES))
    assert shown(now) == shown(committed), "python docs/diagrams docs/images/diagrams"
    assert len(shown(now)) > 3
    assert "var(--ink" in committed
    assert len(committed) < 100_000
    pages = [page.read_text(encoding="utf8") for page in BOOK.glob("*.md")]
    [caption] = re.findall(rf"!\[([^]]+)\]\(\.\./images/diagrams/{name}\.svg\)", "\n".join(pages))
    assert len(caption.split()) > 5
    assert plt.get_fignums() == []


def test_every_drawing_has_its_code():
    assert sorted(path.stem for path in IMAGES.glob("*.svg")) == NAMES


def test_the_vector_of_a_decoder_without_attention_does_not_grow(diagram):
    found = diagram("fixed_context")
    assert found.numbers_seen(4) == found.numbers_seen(500) == found.HIDDEN


def test_a_step_looks_most_at_its_own_digit(diagram):
    found = diagram("attention_over_states")
    for step in range(4):
        turn = 0.8 * (torch.arange(4.0) - (3 - step))
        assert_close(found.shares(step), torch.softmax(4 * turn.cos(), -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["one_query", "five_matrices"])
def test_steps_of_the_equation_by_hand(name, diagram):
    module = diagram(name)
    found, scores = module.steps(), module.Q @ module.K.T
    s = scores / module.Q.shape[-1] ** 0.5
    if name == "five_matrices":
        assert_close(found["scaled"], s)
        assert_close(found["scores"], scores)
        s = s.masked_fill(~torch.ones(4, 4).tril().bool(), float("-inf"))
        assert_close(found["masked"], s)
    else:
        assert_close(found["scores"], s)
    assert_close(found["weights"], s.softmax(-1))
    assert_close(found["out"], s.softmax(-1) @ module.V)


def test_masks_by_hand(diagram):
    module = diagram("masks_with_words")
    i, j = torch.arange(6)[:, None], torch.arange(6)
    past = j <= i
    expected = [past, past | (j < 3), past & (i - j < 3), (j < 4).expand(6, 6)]
    for (mask, _), seen in zip(module.MASKS.values(), expected, strict=True):
        assert torch.equal(module.visible(mask), seen)


def test_merged_heads_times_the_last_matrix_are_the_output(diagram):
    found = diagram("heads").steps()
    assert_close(found["heads"].flatten() @ found["mix"].T, found["out"])
    assert found["heads"].shape == (4, 2)


def test_the_order_of_norms(diagram):
    module = diagram("block_norms")
    assert module.order(module.PreNorm) == ["norm", "attention", "norm", "feed-forward"]
    assert module.order(module.PostNorm) == ["attention", "norm", "feed-forward", "norm"]


def test_the_masks_of_three_models(diagram):
    seen = diagram("three_models").visible()
    everything, past = torch.ones(5, 5).bool(), torch.ones(5, 5).tril().bool()
    assert torch.equal(seen["BERT"][0], everything)
    assert torch.equal(seen["GPT"][0], past)
    source, own, cross = seen["Transformer"]
    assert torch.equal(source, everything)
    assert torch.equal(own, past[:4, :4])
    assert torch.equal(cross, everything[:4])


def test_the_online_softmax_ends_at_the_softmax(diagram):
    module = diagram("online_softmax")
    m, l, o = (torch.tensor(x) for x in module.steps()[-1])
    out, statistic = module.answers()
    assert_close(o / l, torch.softmax(module.SCORES, -1) @ module.VALUES)
    assert_close(o / l, out)
    assert_close(m + l.log(), torch.logsumexp(module.SCORES, -1))
    assert_close(m + l.log(), statistic)


def test_a_cache_grows_and_that_of_a_window_does_not(diagram):
    module = diagram("growing_cache")
    assert module.lengths(None) == [1, 2, 3, 4, 5]
    assert max(module.lengths(module.WIDTH)) < module.WIDTH


def test_a_beam_finds_what_greedy_search_does_not(diagram):
    module = diagram("beam_tree")
    found = module.found()
    assert found["greedy"] == ((module.A, module.END), pytest.approx(0.30))
    assert found["beam"] == ((module.B, module.END), pytest.approx(0.36))


def test_drawings_of_a_page_share_no_ids_and_style_nothing_but_themselves():
    spec = spec_from_file_location("drawings", ROOT / "docs" / "site" / "drawings.py")
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    image = '<p><img alt="One &amp; two" src="../images/diagrams/{}.svg" /></p>'
    html = hook.on_page_content("".join(image.format(name) for name in NAMES[:3]))
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert html.count("<svg ") == html.count('aria-label="One &amp; two"') == 3
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', html)) <= set(ids)
    assert "<style" not in html
    assert "<img" not in html
