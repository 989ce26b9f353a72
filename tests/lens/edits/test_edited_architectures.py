"""Edits of architectures of transformers, by kernels and written out, beside the definition within a softmax."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from regard.lens import Boost, CaptureWarning, Cut, Scale, Temperature, capture, edit
from tests.lens.edits.dense_edits import EditedSoftmax
from tests.lens.test_architectures import fused, inputs, made, small

NAMES = """
albert bart bert bloom clip_vision_model deberta-v2 distilbert electra falcon gemma2 gpt2 gpt_neox gpt_oss gptj llama
mistral mpt opt qwen3 roberta t5 vit
""".split()  # noqa: SIM905
CORE = ("bart", "bert", "gpt_oss", "llama", "t5")
EDITS = [
    Boost(3, 1.5, heads=0),
    Cut(queries=-1, keys=[0, 2]),
    Temperature([1], 0.5),
    Scale([2], -0.5),
    Cut(queries=slice(4, None), keys=1, heads=3),
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CORE else pytest.mark.libraries) for name in NAMES]
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@torch.no_grad()
def test_an_edited_architecture_equals_the_definition(name):
    # The code of gpt_oss shifts scores and the logit of the sink by the largest one before the softmax.
    edits = [each for each in EDITS if name != "gpt_oss" or not isinstance(each, Temperature)]
    config = small(CONFIG_MAPPING[name])
    eager = made(config, "eager")
    given = inputs(eager, config)
    real = torch.ones(2, 9, dtype=torch.bool)
    shown = torch.ones(2, 1, dtype=torch.bool)
    if "input_ids" in given:
        real[1, :2] = False
        given["attention_mask"] = real.long()
        shown = real
    if "decoder_input_ids" in given:
        shown = torch.ones(2, 7, dtype=torch.bool)
    with EditedSoftmax(edits, real if "input_ids" in given else None) as oracle:
        want = eager(**given)[0]
    assert oracle.count >= 2
    shown = shown.expand(want.shape[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # rows of padding that see no key
        for model in (eager, fused(config)):
            plain = model(**given)[0]
            with edit(model, {"*": edits}), capture(model) as tape:
                out = model(**given)[0]
            torch.testing.assert_close(out[shown], want[shown], atol=1e-5, rtol=1e-4)
            assert (out - plain).abs().max() > 1e-2
            assert not any(A[:, :, -1, 0][1].any() for A in tape.values() if A.shape[-2] == A.shape[-1] == 7)
            assert torch.equal(model(**given)[0], plain)
