"""check has no finding in the architectures of transformers, but those that are true of them."""

import warnings

import pytest

pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import regard
from tests.lens.test_architectures import made, small

NAMES = """
afmoe albert arcee bart bert biogpt bloom clip_text_model clip_vision_model codegen cohere2 convbert ctrl
deberta-v2 deepseek_v3 diffllama distilbert electra ernie exaone4 falcon gemma2 gpt2 gpt_neox gpt_oss granite helium
jetmoe llama m2m_100 marian mbart mistral mixtral modernbert mpnet mpt nomic_bert olmo2 opt pegasus phi3 plbart
qwen2_moe qwen3 roberta roformer segformer siglip_vision_model stablelm starcoder2 t5 vit xglm xlnet
""".split()  # noqa: SIM905
FOUND = {"convbert": ["padding"]}  # its dynamic convolution reads the tokens that attention_mask hides


def test_there_are_more_than_forty():
    assert len(NAMES) == len(set(NAMES)) > 50
    assert FOUND.keys() <= set(NAMES)


@pytest.mark.libraries
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_has_no_finding(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers have some of their own
        report = regard.check(made(small(CONFIG_MAPPING[name]), "eager"))
    assert [finding.name for finding in report.findings] == FOUND.get(name, []), str(report)
    assert len(report.passed) >= 3
