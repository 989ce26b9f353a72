"""Pages: one file that needs nothing else, holds what it says, stays small, and lets no token out of its text."""

import base64
import hashlib
import html
import json
import re
import zlib

import numpy as np
import pytest
import torch

from regard import Causal, Padding, Prefix, Window, weights
from regard.lens import Tape
from regard.views import Page, page
from regard.views.viewer.matrix_view import HeadView
from regard.views.viewer.wire_format import COARSE, error, parse_frame

INSIDE = page.__globals__  # of the module, whose name the function has


def resources(page):
    block = re.search(r'<script id="regard-data" type="application/json">(.*?)</script>', page.text, re.DOTALL)
    packed = json.loads(block[1])["resources"]
    return {name: zlib.decompress(base64.b64decode(body)) for name, body in packed.items()}


@pytest.fixture(scope="module")
def printed(tape):
    return tape.page(name="a <b> & c")


def test_a_page_asks_for_nothing(printed):
    markup = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", printed.text, flags=re.DOTALL)
    assert "app.js" not in markup
    assert "app.css" not in markup
    assert not re.search(r'(?:src|href)="(?!data:)', markup)
    assert markup.count('id="regard-data"') == 1


def test_a_page_allows_its_own_script_and_style_and_nothing_else(printed):
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', printed.text)[1]
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", printed.text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "base-uri 'none'; form-action 'none'" in policy
    assert "unsafe" not in policy
    assert printed.text.index("Content-Security-Policy") < printed.text.index("<style>")


def test_two_tapes_are_numbered_or_named_one_by_one(tape):
    named = [capture["name"] for capture in json.loads(resources(page(tape, tape))["session?"])["captures"]]
    assert named == ["capture 1", "capture 2"]
    both = page(tape, tape, name=["before", "after"])
    assert [x["name"] for x in json.loads(resources(both)["session?"])["captures"]] == ["before", "after"]
    with pytest.raises(ValueError, match="name must be a string or a list of 2, one for each tape, got a list of 1"):
        page(tape, tape, name=["before"])


def test_a_file_given_for_a_tape_is_told_how_pages_are_saved(tape):
    with pytest.raises(TypeError, match=r"shows a Tape, got str; to write a file call tape\.page\(\)\.save"):
        tape.page("looked.html")


def test_no_token_leaves_its_text(printed):
    data = re.search(r'type="application/json">(.*?)</script>', printed.text, re.DOTALL)[1]
    assert not set("<>&\u2028\u2029") & set(data)
    assert "<title>a &lt;b&gt; &amp; c</title>" in printed.text
    assert "alert(1)" not in printed.text.replace("<title>", "")
    found = resources(printed)
    assert json.loads(found["text?capture=0&text=0"])["tokens"][0] == "<script>alert(1)</script>"


def test_the_script_cannot_close_its_element(tape, monkeypatch):
    hostile = b'let a = "</script><script>x</SCRIPT><!--"; let b = 1 < 2;'
    real = INSIDE["read_bundled"]
    monkeypatch.setitem(INSIDE, "read_bundled", lambda name: hostile if name == "app.js" else real(name))
    text = tape.page().text
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[-1]
    assert script == 'let a = "\\x3c/script>\\x3cscript>x\\x3c/SCRIPT>\\x3c!--"; let b = 1 < 2;'
    monkeypatch.setitem(INSIDE, "read_bundled", lambda name: b"<html></html>")
    with pytest.raises(RuntimeError, match="the bundled front end does not have the tags"):
        tape.page()


def test_short_inputs_come_with_every_weight(printed, tape):
    found = resources(printed)
    session = json.loads(found["session?"])
    assert session["live"] is False
    for layer, told in enumerate(session["captures"][0]["layers"][:4]):
        assert (told["finest"], told["top"]) == (0, [0, 0])
        for batch in range(2):
            for head in range(4):
                at = f"capture=0&layer={layer}&batch={batch}&head={head}"
                header, arrays = parse_frame(found[f"tile?{at}&minus=none&level=0&row=0&col=0"])
                truth = (tape[layer].dense()[batch, head] * tape.real_queries(layer)[batch, :, None]).numpy()
                assert header["error"] == 0
                assert np.allclose(arrays["weight"], truth, rtol=1e-5, atol=1e-9)
        _, arrays = parse_frame(
            found[f"measures?capture=0&layer={layer}&batch=1&head=3&level={told['measures_level']}"]
        )
        real = tape.real_queries(layer)[1, :, None]
        assert np.allclose(arrays["received"], (tape[layer].dense()[1, 3] * real).sum(0).numpy(), atol=1e-6)


def test_many_weights_are_coded_coarsely_and_it_is_told(tape, monkeypatch):
    monkeypatch.setitem(INSIDE, "MAX_FLOAT_CELLS", 100)
    found = resources(tape.page())
    header, arrays = parse_frame(found["tile?capture=0&layer=0&batch=0&head=0&minus=none&level=0&row=0&col=0"])
    assert header["error"] == error(COARSE) < 0.03
    assert np.allclose(arrays["weight"], tape[0].dense()[0, 0].numpy(), rtol=header["error"] * 1.001, atol=4.3e-7)


def test_everything_the_session_names_is_there(printed):
    found = resources(printed)
    capture = json.loads(found["session?"])["captures"][0]
    for name, kind in (("text", "texts"), ("group", "groups"), ("picture", "pictures")):
        for number in range(len(capture[kind])):
            assert f"{name}?capture=0&{name}={number}" in found
    for layer, told in enumerate(capture["layers"]):
        for batch in range(told["batch"]):
            at = f"capture=0&layer={layer}&batch={batch}"
            assert f"overview?{at}" in found
            for head in (*range(4), "mean", "max"):
                assert f"measures?{at}&head={head}&level={told['measures_level']}" in found
                crossing = told["name"].endswith("cross")
                assert (f"alignment?{at}&head={head}" in found) == crossing
    assert "tile?capture=0&layer=4&batch=0&head=0&minus=none&level=0&row=0&col=0" in found  # of a kept map


@pytest.fixture
def squeezed(monkeypatch):
    """Budgets so small that short inputs are long."""
    monkeypatch.setitem(INSIDE, "MAX_CELLS", 9000)


def long_tape(n=70, layers=1):
    torch.manual_seed(0)
    q, k = 2 * torch.randn(2, 1, 2, n, 8)
    return Tape({(f"layer.{layer}", 0): weights(q, k, mask=Causal()) for layer in range(layers)})


def test_long_inputs_come_as_cells_and_strongest_links(squeezed):
    tape = long_tape()
    found = resources(tape.page())
    told = json.loads(found["session?"])["captures"][0]["layers"][0]
    assert told["finest"] == 1
    A = tape[0].dense()[0]
    tile = "tile?capture=0&layer=0&batch=0&head={}&minus=none&level=1&row=0&col=0"
    for head, truth in ((0, A[0]), (1, A[1]), ("mean", A.mean(0)), ("max", A.amax(0))):
        _, arrays = parse_frame(found[tile.format(head)])
        cells = truth.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).mean((1, 3)).numpy()
        assert np.allclose(arrays["mean"], cells, rtol=0.0295, atol=4.3e-7)
    assert told["top"] == [8, 8]
    _, links = parse_frame(found["links?capture=0&layer=0&batch=0&head=1"])
    best = A[1].topk(8)
    assert np.allclose(links["given_weight"], best.values.numpy(), rtol=0.0295, atol=4.3e-7)
    assert links["given"][60].tolist() == best.indices[60].tolist()
    best = A[1].T.topk(8)
    assert np.allclose(links["received_weight"], best.values.numpy(), rtol=0.0295, atol=4.3e-7)
    assert links["received"][5].tolist() == best.indices[5].tolist()


@pytest.mark.parametrize(
    "mask",
    [Causal() & Window(20), Causal() & (Window(9) | Prefix(3)), ~Prefix(397), Prefix(2), Padding((0,)), Causal()],
    ids=repr,
)
def test_links_are_the_strongest_of_all_whatever_a_mask_hides(squeezed, mask):
    torch.manual_seed(0)
    q, k = 2 * torch.randn(2, 1, 1, 400, 8)
    A = weights(q, k, mask=mask)
    tape = Tape({("a", 0): A})
    truth = A.dense()[0, 0] * tape.real_queries("a")[0, :, None]  # padding asks nothing
    _, links = parse_frame(resources(tape.page())["links?capture=0&layer=0&batch=0&head=0"])
    for name, of in (("given", truth), ("received", truth.T)):
        best = of.topk(8)
        assert np.allclose(links[f"{name}_weight"], best.values.numpy(), rtol=0.0295, atol=4.3e-7)
        seen = best.values.numpy() > 0
        assert (links[name][seen] == best.indices.numpy()[seen]).all()
        assert (np.sort(links[name])[:, 1:] != np.sort(links[name])[:, :-1]).all()


@pytest.mark.thorough
def test_a_window_over_twice_the_text_takes_twice_the_work(monkeypatch):
    found, asked = [], []
    block, over = HeadView.block, Window.over
    monkeypatch.setattr(HeadView, "block", lambda *args: _counted(block(*args), found))
    monkeypatch.setattr(Window, "over", lambda *args: _counted(over(*args), asked))
    took = []
    for n in (2048, 4096):
        q, k = torch.randn(2, 1, 1, n, 4)
        tape = Tape({("a", 0): weights(q, k, mask=Causal() & Window(64))})
        found.clear()
        asked.clear()
        assert any(name.startswith("links?") for name in resources(tape.page()))
        took.append((sum(found), sum(asked)))
        assert max(took[-1]) < 5 * n * 512  # three maps and links both ways
    assert all(more < 2.2 * once for once, more in zip(*took, strict=True))


def _counted(x, counts):
    counts.append(x.numel())
    return x


def test_strongest_links_are_ranked_among_numbers(squeezed):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 70, 8)
    q[..., 7, :] = torch.nan
    tape = Tape({("a", 0): weights(q, k)})
    _, arrays = parse_frame(resources(tape.page())["links?capture=0&layer=0&batch=0&head=0"])
    assert (arrays["received"][:, 0] == tape["a"].dense()[0, 0].nan_to_num(-1).argmax(0).numpy()).all()
    assert (arrays["received_weight"] > 0).all()


def test_very_long_inputs_come_from_the_stored_maps(squeezed, monkeypatch):
    monkeypatch.setitem(INSIDE, "MAX_EXACT_WEIGHTS", 1000)
    tape = long_tape(64)
    tape.summarize()
    monkeypatch.setattr("regard.views.viewer.matrix_view.HeadView.block", lambda *_: pytest.fail("weights were found"))
    found = resources(tape.page())
    told = json.loads(found["session?"])["captures"][0]["layers"][0]
    assert told["top"] == [0, 0]
    tile = f"tile?capture=0&layer=0&batch=0&head=0&minus=none&level={told['finest']}&row=0&col=0"
    header, arrays = parse_frame(found[tile])
    assert header["state"] == "exact"
    cells = tape[0].dense()[0, 0].unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).mean((1, 3)).numpy()
    assert np.allclose(arrays["mean"], cells, rtol=0.0295, atol=4.3e-7)


def test_empty_layers_do_not_stop_a_page_of_stored_maps(squeezed, monkeypatch):
    monkeypatch.setitem(INSIDE, "MAX_EXACT_WEIGHTS", 10)
    q, k = torch.randn(2, 1, 2, 70, 8)
    tape = Tape({("none", 0): weights(q[:0], k[:0]), ("some", 0): weights(q, k)})
    session = json.loads(resources(tape.page())["session?"])
    assert [layer["batch"] for layer in session["captures"][0]["layers"]] == [0, 1]


def test_more_layers_share_one_budget(squeezed, monkeypatch):
    tape = long_tape(layers=4)
    told = json.loads(resources(tape.page())["session?"])["captures"][0]["layers"]
    assert [layer["finest"] for layer in told] == [2] * 4
    assert [layer["top"] for layer in told] == [[8, 8]] * 4
    for characters, most in ((22_000, 3), (0, 0)):
        monkeypatch.setitem(INSIDE, "MAX_DATA_CHARACTERS", characters)
        found = resources(tape.page())
        told = json.loads(found["session?"])["captures"][0]["layers"]
        assert all(layer["top"][0] <= most for layer in told)
        assert any(name.startswith("links?") for name in found) == bool(told[0]["top"][0])
    assert told[0]["top"] == [0, 0]


def test_two_tapes_stand_side_by_side(tape):
    both = tape.page(long_tape())
    session = json.loads(resources(both)["session?"])
    assert [capture["name"] for capture in session["captures"]] == ["capture 1", "capture 2"]
    assert "overview?capture=1&layer=0&batch=0" in resources(both)


def test_a_page_is_written_whole_or_not_at_all(printed, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    printed.save(path)
    assert path.read_text(encoding="utf8") == printed.text

    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Page("new").save(path)
    assert path.read_text(encoding="utf8") == printed.text
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_saved_where_no_folder_is_names_the_folder(printed, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nodir is not a folder; create it before you save x.html there"):
        printed.save(tmp_path / "nodir" / "x.html")


def test_a_page_is_not_saved_over_a_folder(printed, tmp_path):
    with pytest.raises(IsADirectoryError, match=rf"{re.escape(str(tmp_path))} is a folder; name a file in it$"):
        printed.save(tmp_path)


def test_notebooks_show_it_in_a_frame_that_reaches_nothing(printed):
    shown = printed._repr_html_()
    source = re.fullmatch(r'<iframe sandbox="([^"]*)" style="[^"]*" srcdoc="([^"]*)"></iframe>', shown, re.DOTALL)
    assert source[1] == "allow-scripts allow-downloads"
    assert html.unescape(source[2]) == printed.text
    assert repr(printed).startswith("Page(")


def bert(n):
    torch.manual_seed(0)
    pairs = [1.5 * torch.randn(2, 1, 12, n, 64) for _ in range(12)]
    return Tape({(f"layer.{number}", 0): weights(q, k) for number, (q, k) in enumerate(pairs)})


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "most", "level"), [(128, 4e6, 0), (512, 5e6, 2)])
def test_pages_of_a_model_of_twelve_layers_stay_small(n, most, level):
    tape = bert(n)
    printed = tape.page()
    assert len(printed.text.encode()) < most
    told = json.loads(resources(printed)["session?"])["captures"][0]["layers"]
    assert {layer["finest"] for layer in told} == {level}


def wide_tape(layers=3, heads=6, n=256):
    torch.manual_seed(0)
    made = {
        (f"layers.{number}", 0): weights(*torch.randn(2, 1, heads, n, 16), mask=Causal()) for number in range(layers)
    }
    tape = Tape(made)
    tape.tokens = [f"w{number}" for number in range(n)]
    return tape


def session(page):
    return json.loads(resources(page)["session?"])


def test_megabytes_decide_how_fine_the_cells_are_and_bound_the_page():
    tape = wide_tape()
    small, large = tape.page(megabytes=1), tape.page(megabytes=20)
    assert len(small.text) <= 1_050_000
    assert [layer["finest"] for layer in session(small)["captures"][0]["layers"]] == [1, 1, 1]
    assert [layer["finest"] for layer in session(large)["captures"][0]["layers"]] == [0, 0, 0]
    assert session(small)["holds"] == ("means of 2 × 2 weights to within 3 %, the 8 strongest links of each token")
    assert session(large)["holds"] == "every weight"
    for megabytes in (0, -1, 0.9, float("nan")):
        with pytest.raises(ValueError, match=r"megabytes must be at least 1 \(the script takes 0.42\), got"):
            tape.page(megabytes=megabytes)


def test_a_page_of_some_layers_and_heads_holds_these_and_says_so():
    tape = wide_tape()
    tape.summarize()
    part = tape.page(layers=[0, 2], heads=[1, 4])
    found = session(part)
    assert [layer["name"] for layer in found["captures"][0]["layers"]] == ["layers.0", "layers.2"]
    assert [layer["heads"] for layer in found["captures"][0]["layers"]] == [[1, 4], [1, 4]]
    assert found["holds"] == "2 of 3 layers, heads 1, 4 alone, also in means over heads, every weight"
    _, arrays = parse_frame(resources(part)["tile?capture=0&layer=1&batch=0&head=1&minus=none&level=0&row=0&col=0"])
    truth = tape["layers.2"][0, 4].numpy()
    assert np.abs(arrays["weight"] - truth).max() < 1e-6
    _, arrays = parse_frame(resources(part)["measures?capture=0&layer=1&batch=0&head=1&level=1"])
    entropy = tape["layers.2"].entropy()[0, 4].reshape(-1, 2).mean(1).numpy()
    assert np.abs(arrays["entropy"] - entropy).max() < 1e-4
    whole = tape.page(layers="layers.[01]")
    assert session(whole)["holds"].startswith("2 of 3 layers, every weight")


def test_a_part_that_is_not_there_is_refused():
    tape = wide_tape(2, 2, 8)
    with pytest.raises(ValueError, match="heads must be numbers from 0 to 1, got \\[2\\]"):
        tape.page(heads=[2])
    with pytest.raises(KeyError, match="no layer matches 'decoder"):
        tape.page(layers="decoder.*")
    with pytest.raises(IndexError, match="the tape has 2 entries, got index 7"):
        tape.page(layers=[7])
