"""What any model must survive: its config as JSON and its weights as safetensors, read back by another process."""

from __future__ import annotations

import json
from dataclasses import fields

from safetensors.torch import load_file, save_file

from regard.train.dataclass_json import from_json, to_json


def keeps_its_config_and_its_weights(model, folder, **parts):
    """The model built anew from its config, with its weights; `parts` are what its constructor takes besides."""
    text = json.dumps(to_json(model.config))
    config = from_json(type(model.config), text, source="config.json")
    assert config == model.config
    assert {type(getattr(config, field.name)) for field in fields(config)} <= {int, float, str, bool, tuple, type(None)}
    save_file(model.state_dict(), folder / "model.safetensors")
    other = type(model)(config, **parts).to(next(model.parameters()).dtype)
    other.load_state_dict(load_file(folder / "model.safetensors"))
    return other.train(model.training)
