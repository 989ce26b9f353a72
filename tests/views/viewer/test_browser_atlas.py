"""The atlas and predictions on screen: roles, clusters and effects of the lens, probabilities of the model."""

import math

import pytest
import torch

from regard.lens import Tape, capture, head_clusters, head_roles, importance
from regard.models import Gpt, GptConfig
from regard.views import page
from tests.lens.analysis.test_head_roles import planted_tape
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser

LETTERS = {"previous_token": "pr", "induction": "in", "duplicate_token": "du", "retrieval": "re", "positional": "po"}
VOCABULARY = [f"w{n}" for n in range(40)]


@pytest.fixture(scope="module")
def planted():
    tape, roles, _ = planted_tape()
    tape.effect("loss without it", {"layer": [0.25 * head for head in range(len(roles))]})
    return tape, roles


@pytest.fixture(scope="module")
def read():
    """A float64 model, its tape with predictions and effects, and its own log-probabilities."""
    torch.manual_seed(0)
    model = Gpt(GptConfig(vocabulary=40, dim=16, depth=2, heads=2, length=24)).double().eval()
    ids = torch.randint(40, (1, 20))
    with importance(model) as scores, capture(model, [VOCABULARY[n] for n in ids[0]]) as tape:
        logits = model(ids)
        logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).mean().backward()
    tape.predict(logits, ids, VOCABULARY)
    tape.effect("gradient", scores)
    return tape, ids[0], logits.detach()[0].log_softmax(-1), scores


def check_atlas(watched, tape, roles):
    """The legend counts the planted roles, marks name them, and the filter keeps their heads."""
    watched.until("document.querySelectorAll('.roles .role').length > 0")
    names = {"": "no role", **{role: role.replace("_", " ") for role in LETTERS}, "sink": "sink"}
    for role in set(roles):
        button = watched.page.locator(f'[data-control="role:{role or "none"}"]')
        assert button.inner_text().split()[-1] == str(roles.count(role))
        assert names[role] in button.inner_text()
        button.click()
        watched.settle()
        shown_heads = watched.page.locator("button.head").evaluate_all("all => all.map(one => +one.dataset.head)")
        assert shown_heads == [head for head, own in enumerate(roles) if own == role]
        button.click()
        watched.settle()
    marks = watched.page.locator("button.head").evaluate_all(
        "all => all.map(one => [...one.querySelectorAll('.badge-role')].map(mark => mark.textContent))"
    )
    assert marks == [[LETTERS[role]] if role in LETTERS else [] for role in roles]
    about = watched.page.locator("button.head").nth(1).get_attribute("aria-label")
    assert f"roles: induction {float(head_roles(tape)['induction'][1]):.2g}" in about
    assert "loss without it 0.25" in about


def test_roles_are_marks_filters_and_groups(chromium, planted):
    tape, roles = planted
    with shown(chromium, tape) as watched:
        check_atlas(watched, tape, roles)
        watched.go(view="overview", sort="role")
        titles = watched.page.locator(".group h2").all_inner_texts()
        assert [title.split()[-1] for title in titles] == ["1", "1", "1", "1", "1", "3", "3"]
        watched.go(view="overview", filter="induction>0.5")
        assert watched.page.locator("button.head").count() == 1
        watched.go(view="overview", sort="effect")
        order = watched.page.locator("button.head").evaluate_all("all => all.map(one => +one.dataset.head)")
        assert order == list(range(len(roles)))[::-1]
        assert watched.text("button.head .name b") == "2.5"


def test_clusters_on_screen_are_those_of_the_lens(chromium, planted):
    tape, _ = planted
    found = head_clusters(tape)
    clusters = {}
    for head, cluster in zip(found["head"], found["cluster"], strict=True):
        clusters.setdefault(cluster, []).append(head)
    with shown(chromium, tape) as watched:
        watched.go(view="overview", sort="similarity")
        watched.until("document.querySelectorAll('.island').length > 0")
        on_screen = watched.page.locator(".island").evaluate_all(
            "all => all.map(one => [...one.querySelectorAll('button.head')].map(head => +head.dataset.head))"
        )
        several = [heads for heads in clusters.values() if len(heads) > 1]
        alone = [head for heads in clusters.values() if len(heads) == 1 for head in heads]
        assert on_screen == [*several, alone]
        assert "mean cosine similarity of all weights is at least 0.7" in watched.text(".known")
        header, *rows = watched.table()
        cluster, head = header.index("cluster"), header.index("head")
        groups = {}
        for row in rows:
            groups.setdefault(row[cluster], set()).add(int(row[head]))
        assert sorted(map(sorted, groups.values())) == sorted(map(sorted, [*several, *([head] for head in alone)]))


def check_predictions(watched, ids, p, tolerance):
    watched.go(view="text", chosen="7,7")
    watched.until("document.querySelectorAll('[data-side=predictions] li').length > 0")
    own = float(p[6, ids[7]].exp())
    assert f"probability {own:.3g}" in watched.text(".links header .hint")
    numbers = watched.page.locator('[data-side="predictions"] .number')
    values = numbers.evaluate_all("all => all.map(one => +one.dataset.p)")
    names = watched.page.locator('[data-side="predictions"] .token').all_inner_texts()
    here = p[6].exp().topk(5)
    expected = list(zip([VOCABULARY[n] for n in here.indices], here.values.tolist(), strict=True))
    if int(ids[7]) not in here.indices.tolist():
        expected.append((VOCABULARY[ids[7]], own))
    following = p[7].exp().topk(5)
    expected += zip([VOCABULARY[n] for n in following.indices], following.values.tolist(), strict=True)
    if int(ids[8]) not in following.indices.tolist():
        expected.append((VOCABULARY[ids[8]], float(p[7, ids[8]].exp())))
    assert names == [name for name, _ in expected]
    assert all(math.isclose(x, y, rel_tol=tolerance) for x, (_, y) in zip(values, expected, strict=True))
    marks = watched.page.locator(".running .tok").evaluate_all(
        "all => all.map(one => parseFloat(one.style.getPropertyValue('--surprise')))"
    )
    for n, mark in enumerate(marks):
        assert math.isnan(mark) if n == 0 else abs(mark - min(1, -float(p[n - 1, ids[n]]) / 10)) < 1e-3
    watched.go(view="text", chosen="4,9")
    watched.until("document.querySelector('[data-sum]') !== null")
    total = float(watched.page.locator("[data-sum]").get_attribute("data-sum"))
    assert math.isclose(total, sum(float(p[n - 1, ids[n]]) for n in range(4, 10)), rel_tol=1e-5)
    watched.go(view="text", predictions="hidden")
    assert watched.page.locator(".tok.marked").count() == 0


def test_predictions_beside_the_text_are_the_models_own_in_float64(chromium, read):
    tape, ids, p, scores = read
    with shown(chromium, tape) as watched:
        check_predictions(watched, ids, p, 1e-5)
        header, *rows = watched.table()
        assert header[2] == "log-probability"
        for n in range(1, 20):
            assert math.isclose(float(rows[n][2]), float(p[n - 1, ids[n]]), rel_tol=1e-6)
        watched.go(view="overview")
        header, *rows = watched.table()
        column = header.index("gradient")
        given = torch.cat(list(scores.values()))
        assert all(math.isclose(float(row[column]), float(x), rel_tol=1e-9) for row, x in zip(rows, given, strict=True))


def test_a_page_shows_the_same(chromium, planted, read, tmp_path):
    tape, roles = planted
    page(tape).save(tmp_path / "atlas.html")
    with opened(chromium, (tmp_path / "atlas.html").as_uri()) as watched:
        check_atlas(watched, tape, roles)
        watched.go(view="overview", sort="similarity")
        watched.until("document.querySelectorAll('.island').length > 0")
    tape, ids, p, _ = read
    page(tape).save(tmp_path / "read.html")
    with opened(chromium, (tmp_path / "read.html").as_uri()) as watched:
        check_predictions(watched, ids, p, 1e-5)


def test_captures_without_predictions_and_effects_show_none(chromium):
    tape = planted_tape()[0].select("*")
    assert isinstance(tape, Tape)
    with shown(chromium, tape) as watched:
        watched.go(view="text", chosen="3,3")
        assert watched.page.locator('[data-side="predictions"], [data-control="predictions"]').count() == 0
        watched.go(view="overview")
        assert watched.page.locator(".effect").count() == 0
