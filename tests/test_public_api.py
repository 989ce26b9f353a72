"""What users see: few names, documented, with shapes that hold."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import regard

PUBLIC = sorted(regard.__all__)


def test_at_most_forty_four_names_and_all_of_them_exist():
    assert len(PUBLIC) <= 44
    assert all(hasattr(regard, name) for name in PUBLIC)
    assert len(set(PUBLIC)) == len(PUBLIC)


def test_the_names_of_the_contract_are_there():
    masks = "Causal Window Dilated Diagonal Prefix Global Near Padding Documents Blocks Dense Rule"
    scores = "Dot Cosine Bilinear Additive Location"
    biases = "Alibi Relative Gaussian Added"
    normalizers = "Softmax SinkSoftmax Sigmoid Sparsemax Entmax Hard Tapered"
    functions = "attend weights explain parse"
    for name in " ".join((masks, scores, biases, normalizers, functions)).split():
        assert name in PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    assert inspect.getdoc(getattr(regard, name))
    assert "dataclass" not in (inspect.getdoc(getattr(regard, name)) or "")


@pytest.mark.parametrize("name", ["attend", "weights", "explain"])
def test_functions_take_data_by_place_and_the_rest_by_name(name):
    parameters = inspect.signature(getattr(regard, name)).parameters
    by_place = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place in (["q", "k", "v"], ["q", "k"])
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())


@pytest.mark.thorough
def test_shapes_in_signatures_hold_when_checked():
    code = """
from jaxtyping import install_import_hook
with install_import_hook("regard.ops.operator", "beartype.beartype"):
    import torch, regard, regard.ops.operator
q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3)
assert regard.attend(q, k, v, mask=regard.Causal(), bias=regard.Alibi(4)).shape == (2, 4, 5, 3)
assert regard.attend(q[None], k[None], v[None]).shape == (1, 2, 4, 5, 3)
regard.weights(q, k)
regard.explain(q, k, v)
try:
    regard.attend(q, k, v[:, :, :4])
except Exception as error:
    print(type(error).__name__)
"""
    # -B: the hook's cached bytecode of one test holds modules that another test wants instrumented.
    run = subprocess.run([sys.executable, "-B", "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "TypeCheckError" in run.stdout


@pytest.mark.processes
def test_rooms_come_when_asked_for():
    code = "import regard, sys; assert 'regard.nn' not in sys.modules; print(regard.nn.Attention(8, 2).heads)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "2", run.stderr
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'nothing'"):
        _ = regard.nothing


def test_the_rooms_and_capture_are_reached_from_the_top():
    assert regard.capture is regard.lens.capture
    assert {"capture", "nn", "models", "lens", "attend"} <= set(dir(regard))


@pytest.mark.processes
def test_type_checkers_know_the_rooms(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "own.py"
    file.write_text("import regard\nregard.nn.Attention(64, heads=4)\nregard.nn.Atention(64)\n", encoding="utf8")
    command = [sys.executable, "-m", "mypy", str(file)]  # with the options of `make lint`, so that its cache serves
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert 'own.py:3: error: Module has no attribute "Atention"' in said
    assert "own.py:2" not in said
