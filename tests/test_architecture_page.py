"""docs/architecture.md: every step it lists runs, in that order, in the file it links to."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard import Alibi, Causal, Window, attend
from regard.lens import capture
from tests.test_architecture import ROOMS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "regard"


def steps(heading: str) -> list[tuple[str, Path]]:
    """The functions, and the files they link to, in the table under a heading."""
    section = PAGE.read_text(encoding="utf8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| \[[^]]+\]\(\.\./([\w/.]+)\)", section, flags=re.MULTILINE)
    return [(name, ROOT / path) for name, path in rows]


def calls(run: Callable[[], object]) -> list[tuple[str, Path]]:
    """The functions of regard that ran, by qualified name and file, each where it was first called."""
    order: dict[tuple[str, Path], None] = {}

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            order.setdefault((frame.f_code.co_qualname, Path(frame.f_code.co_filename)))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(order)


def run_attend() -> object:
    q, k, v = torch.randn(3, 1, 8, 1024, 32)
    return attend(q, k, v, mask=Causal() & Window(256), bias=Alibi(8))


def run_capture() -> object:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[0, 5, 6, 7, 8], [1, 2, 3, 4, 5]])
    keep = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])  # a padded batch, so there is a mask to interpret
    with capture(model) as tape, torch.no_grad():
        model(input_ids=ids, attention_mask=keep)
    return tape[0].entropy()


@pytest.mark.parametrize(
    ("heading", "run"), [("q through attend", run_attend), ("A Hugging Face model through capture", run_capture)]
)
def test_the_steps_of_a_diagram_run_in_its_order(heading, run):
    listed = steps(heading)
    assert len(listed) >= 6
    ran = calls(run)
    missing = [(name, str(path.relative_to(ROOT))) for name, path in listed if (name, path) not in ran]
    assert missing == [], "not called"
    places = [ran.index(step) for step in listed]
    in_order = [name for _, (name, _) in sorted(zip(places, listed, strict=True))]
    assert places == sorted(places), in_order


def test_every_room_and_every_link_exists():
    text = PAGE.read_text(encoding="utf8")
    assert all((PAGE.parent / link).exists() for link in re.findall(r"\]\(([\w./]+)\)", text))
    rooms = set(re.findall(r"^\| \[`(\w+)/`\]", text, flags=re.MULTILINE))
    assert rooms == set(ROOMS) | {"cli"}
