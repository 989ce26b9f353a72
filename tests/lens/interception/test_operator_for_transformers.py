"""Models of transformers on regard.attend, beside the same models with attention written out."""

import subprocess
import sys
import warnings

import pytest
import torch

from regard import Causal, Padding, Window
from regard.lens import CaptureWarning, Cut, capture, edit, register_transformers
from regard.lens.interception.operator_for_transformers import PositionedMask, regard_attention, regard_mask
from regard.ops.terms.masks.mask_algebra import conjuncts

architectures = pytest.importorskip("tests.lens.test_architectures")
tiny = pytest.importorskip("tests.lens.tiny_transformers")
NAMES = """
albert bart bert clip_vision_model distilbert electra gemma2 gemma3_text gpt2 gpt_neox gpt_oss granite llama mistral
modernbert olmo2 opt phi3 qwen3 roberta smollm3 starcoder2 t5 vit
""".split()  # noqa: SIM905
CORE = ("bart", "gemma2", "gpt_oss", "llama", "t5")


@pytest.fixture(autouse=True)
def registered(registries):
    register_transformers()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CORE else pytest.mark.libraries) for name in NAMES]
)
def test_an_architecture_on_the_operator_equals_the_one_written_out(name):
    config = architectures.small(architectures.CONFIG_MAPPING[name])
    eager, ours = (architectures.made(config, kind) for kind in ("eager", "regard"))
    given = architectures.inputs(eager, config)
    real = torch.ones(2, 9, dtype=torch.bool)
    if "input_ids" in given:
        real[1, 6:] = False
        given["attention_mask"] = real.long()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        want, out = eager(**given)[0], ours(**given)[0]
        shown = real if out.shape[1] == 9 else torch.ones(out.shape[:2], dtype=torch.bool)
        torch.testing.assert_close(out[shown], want[shown], atol=2e-4, rtol=1e-3)
        with capture(eager) as theirs:
            eager(**given)
        with capture(ours) as tape:
            assert torch.equal(ours(**given)[0], out)
        assert tape.layers == theirs.layers
        for A, B in zip(tape.values(), theirs.values(), strict=True):
            rows = slice(0, 6) if A.shape[-2] == 9 else slice(None)
            torch.testing.assert_close(A.dense()[:, :, rows], B.dense()[:, :, rows], atol=2e-4, rtol=1e-3)
        if "output_attentions" in eager.forward.__code__.co_varnames or name in ("llama", "bert"):
            attentions = ours(**given, output_attentions=True).get("attentions")
            if attentions and attentions[0] is not None:
                torch.testing.assert_close(attentions[0], tape[0].dense(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [tiny.llama, tiny.mistral, tiny.gemma2], ids=["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_a_generation_on_the_operator_is_that_of_sdpa(kind, cache):
    ids = torch.tensor([[5, 9, 11, 7], [0, 0, 23, 12]])
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": cache} if cache else {}
    found = [tiny.made(kind, name).generate(ids, **options) for name in ("eager", "regard")]
    assert torch.equal(*found)


def test_masks_of_transformers_become_terms():
    def made(**given):
        return regard_mask(2, 6, 6, **given)

    from transformers import masking_utils as masks

    keep = torch.tensor([[True] * 6, [False, False] + [True] * 4])
    assert made().mask == Causal()
    assert made(mask_function=masks.sliding_window_causal_mask_function(3)).mask == Causal() & Window(3)
    assert made(mask_function=masks.bidirectional_mask_function).mask is None
    padded = list(conjuncts(made(attention_mask=keep).mask))
    assert padded[0] == Causal()
    assert isinstance(padded[1], Padding)
    step = regard_mask(2, 1, 9, q_offset=8)
    assert (step.mask, step.offset) == (None, 8)
    assert regard_mask(2, 1, 16, q_offset=8).mask == Causal()  # a static cache
    odd = made(mask_function=lambda b, h, q, k: (q * 7 + k * 3) % 5 < 3).mask
    rows, keys = torch.arange(6)[:, None], torch.arange(6)
    shown = torch.stack([odd(torch.tensor(0), torch.tensor(0), rows[n], keys) for n in range(6)])
    assert torch.equal(shown, (rows * 7 + keys * 3) % 5 < 3)


def test_masks_of_the_user_and_gradients():
    model = tiny.made(tiny.llama, "regard")
    eager = tiny.made(tiny.llama, "eager")
    ids = torch.randint(3, 60, (2, 6))
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    keep[:, :, 4, 1] = False
    added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    want = eager(ids, attention_mask=added).logits
    for mask in (keep, added):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, want, atol=1e-4, rtol=1e-3)
    for each in (model, eager):
        each(ids).logits.square().mean().backward()
    for (name, x), y in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_a_model_on_the_operator_is_edited():
    model = tiny.made(tiny.llama, "regard")
    with torch.no_grad(), edit(model, {"*": Cut(queries=-1, keys=0)}), capture(model) as tape:
        model(torch.arange(6)[None])
    assert not tape[0][:, :, -1, 0].any()


def test_a_paged_cache_is_refused():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="has no paged cache"):
        regard_attention(torch.nn.Module(), q, q, q, None, cache=object())
    assert repr(PositionedMask(Causal(), 2, (1, 1, 3, 5))) == "PositionedMask(Causal(), 2)"


@pytest.mark.processes
def test_transformers_is_imported_by_the_call_alone():
    code = "import sys, regard.lens; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
