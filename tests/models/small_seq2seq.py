"""Small models of Seq2Seq with every attention."""

import torch

from regard.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tests.models.generator_checks import SOURCES, START, VOCABULARY, D

KINDS = {
    "none": {"attention": None},
    "bahdanau": {"attention": "bahdanau", "cell": "lstm"},
    "dot": {"attention": "dot", "layers": 2},
    "general": {"attention": "general", "modulate": "gate"},
    "concat": {"attention": "concat", "modulate": "dot"},
    "location": {"attention": "location"},
    "local_monotonic": {"attention": "local_monotonic", "radius": 2.0},
    "local_predictive": {"attention": "local_predictive", "radius": 3.0},
    "feed": {"attention": "general", "feed": True, "cell": "lstm", "layers": 2},
    "local_feed": {"attention": "local_monotonic", "radius": 2.0, "feed": True},
    "coverage": {"attention": "bahdanau", "coverage": 0.7},
    "one_way": {"bidirectional": False, "tied": "output", "hidden": 13},
}


def config(**options):
    sizes = {"source_vocabulary": SOURCES, "target_vocabulary": VOCABULARY, "start": START, "dim": 10, "hidden": 12}
    return Seq2SeqConfig(**{**sizes, "dropout": 0.0, **options})


def model_of(kind):
    model = Seq2Seq(config(**KINDS[kind])).to(D).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that states differ and attention is not flat
    return model
