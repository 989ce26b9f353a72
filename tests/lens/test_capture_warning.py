"""CaptureWarning: every warning of the lens has this category, so that one filter silences all of them."""

import ast
import warnings
from pathlib import Path

import pytest
import torch

import regard.lens
from regard.lens import CaptureWarning, capture
from regard.nn import Attention


def test_every_warning_of_the_lens_has_this_category():
    sources = [path.read_text(encoding="utf8") for path in Path(regard.lens.__file__).parent.rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn"]
    warned = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "warnings.warn"]
    assert len(warned) > 9
    assert [call for call in warned if "CaptureWarning" not in call] == []


def test_a_filter_of_the_category_silences_a_warning():
    model, x = Attention(8, heads=2), torch.randn(1, 5, 8)
    with pytest.warns(CaptureWarning, match="2 tokens were given"), capture(model, ["a", "b"]):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=CaptureWarning)
        with capture(model, ["a", "b"]):
            model(x)
