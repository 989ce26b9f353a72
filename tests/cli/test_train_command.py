"""`regard train`: the plan of a run from a saved run, a config file and flags, in this order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from regard.cli.train_command import flags_by_panel, make_plan, plan_to_json, read_config
from regard.cli.training_flags import Training
from tests.cli.commands import SMALL, run, well

pytestmark = pytest.mark.commands


@pytest.mark.parametrize(("name", "marked"), [("plan.toml", False), ("plan.json", False), ("plan.json", True)])
def test_a_config_file_says_what_flags_say_and_flags_override_it(name, marked, files, tmp_path):
    plan = {
        "data": {"source": str(files / "a.de"), "target": str(files / "a.en")},
        "vocabulary": {"kind": "char"},
        "model": {"kind": "rnn", "dim": 8, "dropout": 0},
        "training": {"steps": 3, "rate": 0.5},
    }
    toml = "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for section, values in plan.items()
    )
    encoding = "utf-8-sig" if marked else "utf-8"
    (tmp_path / name).write_text(toml if name.endswith("toml") else json.dumps(plan), encoding=encoding)
    well("train", "translation", "--config", tmp_path / name, "--steps", 1, "--dim", 12, "--out", tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "step-00000001" / "plan.json").read_text())
    assert saved["training"]["steps"] == 1
    assert saved["training"]["rate"] == 0.5
    assert saved["model"] == {
        "kind": "rnn",
        "dim": 12,
        "hidden": None,
        "depth": None,
        "heads": 4,
        "cell": "gru",
        "dropout": 0,
        "smoothing": 0.1,
        "tied": None,
    }
    assert "valid" not in saved


def test_the_plan_of_a_run_is_a_config_file(translator, tmp_path):
    plan = translator / "best" / "plan.json"
    well("train", "translation", "--config", plan, "--steps", 4, "--out", tmp_path / "again")
    weights = [(run / "step-00000004" / "model.safetensors").read_bytes() for run in (translator, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_a_new_run_may_be_told_to_resume(files, tmp_path):
    flags = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", *SMALL]
    for _ in range(2):
        well("train", "translation", *flags, "--out", tmp_path / "run", "--resume")


def test_other_models_cannot_be_resumed_into_a_run(recurrent):
    ended = run("train", "translation", "--out", recurrent, "--resume", "--dim", 32)
    assert ended.code == 2
    assert "error: a resumed run cannot change its model: dim was 16, got 32; give --out a new folder" in ended.err


@dataclass(frozen=True, kw_only=True)
class Data:
    source: Annotated[str | None, "A file."] = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    dim: Annotated[int, "Width."] = 8
    kind: Annotated[str, "Kind.", "--model"] = "rnn"


@dataclass(frozen=True, kw_only=True)
class Plan:
    data: Data
    valid: Data | None
    model: Shape
    training: Training


@dataclass(frozen=True, kw_only=True)
class Texts:
    labelled: Annotated[str | None, "A table."] = None
    text_column: Annotated[str, "Column of the texts."] = "1"


@dataclass(frozen=True, kw_only=True)
class Labelled:
    data: Texts
    valid: Texts | None
    training: Training


def flag(name):
    panels = (*flags_by_panel(Plan).values(), *flags_by_panel(Labelled).values())
    return next(flag for flags in panels for flag in flags if flag.name == name)


def test_each_section_has_a_panel_of_its_own_and_validation_flags_a_prefix():
    panels = flags_by_panel(Plan)
    assert list(panels) == ["Training data", "Validation data", "Model", "Training"]
    assert [[flag.name for flag in panels[name]] for name in list(panels)[:3]] == [
        ["--source"], ["--valid-source"], ["--dim", "--model"],
    ]  # fmt: skip


def test_flags_override_the_config_file_which_overrides_the_saved_run():
    saved = {"data": {"source": "saved"}, "training": {"steps": 1, "rate": 0.5, "seed": 3}}
    config = {"training": {"steps": 2, "rate": 0.25}}
    plan = make_plan(Plan, saved, config, {flag("--steps"): 7}, source=Path("plan.toml"))
    assert (plan.training.steps, plan.training.rate, plan.training.seed) == (7, 0.25, 3)
    assert plan.data == Data(source="saved")
    assert plan.valid is None
    assert plan.model == Shape()


def test_validation_is_there_once_it_has_a_file():
    assert make_plan(Plan, {}, {}, {flag("--valid-source"): "v"}, source=None).valid == Data(source="v")


def test_a_resumed_run_may_change_its_data_and_training_but_not_its_model():
    saved = {"data": {"source": "a"}, "model": {"dim": 8}, "training": {"steps": 1}}
    given = {flag("--source"): "b", flag("--steps"): 2, flag("--dim"): 8}
    plan = make_plan(Plan, saved, {}, given, source=None)
    assert (plan.data.source, plan.training.steps) == ("b", 2)
    with pytest.raises(ValueError, match="a resumed run cannot change its model: dim was 8, got 9; give --out a new"):
        make_plan(Plan, saved, {"model": {"dim": 9}}, given | {flag("--dim"): 9}, source=None)


def test_a_wrong_value_is_named_with_the_file_or_the_section_it_comes_from():
    with pytest.raises(ValueError, match=r"^plan\.toml \[training\]: steps must be a whole number"):
        make_plan(Plan, {}, {"training": {"steps": "many"}}, {}, source=Path("plan.toml"))
    with pytest.raises(ValueError, match=r"^\[training\]: steps must be a whole number"):
        make_plan(Plan, {}, {}, {flag("--steps"): "many"}, source=None)
    with pytest.raises(ValueError, match=r"^plan\.toml \[model\]: unknown key 'dimm'; did you mean 'dim'\?"):
        make_plan(Plan, {}, {"model": {"dimm": 3}}, {}, source=Path("plan.toml"))


def test_a_plan_comes_back_from_the_config_file_that_it_is_written_to(tmp_path):
    plan = make_plan(Plan, {}, {}, {flag("--dim"): 12, flag("--source"): "a"}, source=None)
    saved = plan_to_json(plan)
    assert saved.keys() == {"data", "model", "training"}
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    assert make_plan(Plan, {}, read_config(tmp_path / "plan.json", Plan), {}, source=None) == plan


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the config file .*none\.toml: No such file or directory"):
        read_config(tmp_path / "none.toml", Plan)
    for name, content, message in (
        ("a.json", b"[1]", "a.json must be an object of sections, data, valid, model, training, got list"),
        ("b.toml", b"[modle]\ndim = 3\n", r"b.toml: unknown section 'modle'; did you mean 'model'\?"),
        ("c.json", b'{"model": 3}', "c.json: section 'model' must hold keys and values, got 3"),
        ("d.toml", b"[model\n", "d.toml is not valid TOML"),
        ("e.json", b"[" * 100_000, "e.json is not valid JSON"),
        ("f.json", b"\xff", "f.json is not valid UTF-8; expected a config file"),
        ("g.json", b" " * (2**20 + 1), "g.json is larger than 1,048,576 bytes, too large for a config file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path / name, Plan)


def test_validation_data_is_read_as_training_data_is_unless_flags_say_otherwise():
    columns = {flag("--labelled"): "a.tsv", flag("--text-column"): "sentence", flag("--valid-labelled"): "b.tsv"}
    plan = make_plan(Labelled, {}, {}, columns, source=None)
    assert plan.valid == Texts(labelled="b.tsv", text_column="sentence")
    plan = make_plan(Labelled, {}, {}, {**columns, flag("--valid-text-column"): "2"}, source=None)
    assert plan.valid.text_column == "2"
    del columns[flag("--valid-labelled")]
    assert make_plan(Labelled, {}, {}, columns, source=None).valid is None


@pytest.mark.parametrize("key", ["kind", "model"])
def test_keys_of_a_config_file_are_fields_or_flags(key, tmp_path):
    (tmp_path / "a.toml").write_text(
        f'[model]\n{key} = "gpt"\n[valid]\nvalid-source = "v"\n[training]\nsave-every = 3\n'
    )
    plan = make_plan(Plan, {}, read_config(tmp_path / "a.toml", Plan), {}, source=tmp_path / "a.toml")
    assert (plan.model.kind, plan.valid.source, plan.training.save_every) == ("gpt", "v", 3)


def test_setting_given_by_its_field_and_its_flag_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('[model]\nkind = "gpt"\nmodel = "rnn"\n')
    with pytest.raises(ValueError, match=r"a\.toml \[model\]: 'model' is given twice, also as 'kind'; leave one out"):
        read_config(tmp_path / "a.toml", Plan)


def test_a_null_setting_that_earlier_versions_wrote_for_every_task_is_left_out(tmp_path):
    settings = {"steps": 9, "forcing": None, "forcing_k": None}
    (tmp_path / "plan.json").write_text(json.dumps({"training": settings}))
    plan = make_plan(Plan, read_config(tmp_path / "plan.json", Plan), {}, {}, source=None)
    assert plan.training.steps == 9
    (tmp_path / "plan.json").write_text(json.dumps({"training": settings | {"forcing": "linear"}}))
    with pytest.raises(ValueError, match="unknown key 'forcing'"):
        make_plan(Plan, read_config(tmp_path / "plan.json", Plan), {}, {}, source=None)


@pytest.mark.parametrize("name", ["a.yaml", "a.yml"])
def test_yaml_is_refused_by_name(name, tmp_path):
    (tmp_path / name).write_text("model:\n  kind: rnn\n")
    with pytest.raises(ValueError, match=rf"{name} is YAML, which is not read; write the settings as TOML or JSON"):
        read_config(tmp_path / name, Plan)


def test_warmup_of_a_short_run_is_a_tenth_of_it_and_stays_when_it_is_resumed(files, tmp_path):
    flags = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", "--out", tmp_path / "run"]
    small = ["--dim", 16, "--save-every", 20]
    assert "the warm-up takes" not in well("train", "translation", *flags, *small, "--steps", 20).err
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["rate"]["warmup"] == 2
    well("train", "translation", "--out", tmp_path / "run", "--resume", "--steps", 60)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["rate"]["warmup"] == 2


def test_warmup_beyond_a_fifth_of_the_run_is_reported(files, tmp_path):
    flags = ["--source", files / "a.de", "--target", files / "a.en", "--model", "rnn", "--dim", 16, "--steps", 4]
    ended = well("train", "translation", *flags, "--warmup", 400, "--out", tmp_path / "run")
    assert (
        "the warm-up takes 400 of 4 steps, so the learning rate reaches 1.0e-05 of 1.0e-03; a fifth of the steps, 1, "
        "is enough for most models" in ended.err
    )


TASKS = {
    "translation": ["--source", "a.de", "--target", "a.en", "--valid-source", "a.de", "--valid-target", "a.en"],
    "language": ["--text", "a.en", "--valid-text", "a.de", "--length", 8, "--batch-tokens", 16],
    "summarization": ["--documents", "news", "--summaries", "headlines"],
    "answering": ["--data", "squad.json"],
    "classification": ["--labelled", "reviews.tsv", "--valid-labelled", "reviews.tsv"],
    "captioning": ["--captions", "captions.tsv", "--images", "scenes"],
}


@pytest.mark.parametrize("task", TASKS)
def test_data_is_checked_by_the_flags_of_training_and_nothing_is_written(task, files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    flags = [*TASKS[task], "--dim", 16]
    ended = well("check-data", task, *flags)
    assert ended.lines[-1] == "nothing was written"
    starts = [line.partition(": ")[0] for line in ended.lines]
    assert {"model", "memory", "time", "disk"} <= set(starts)
    assert any("tokens are unknown" in line for line in ended.lines)
    dry = well("train", task, *flags, "--dry-run", "--out", tmp_path / "run")
    assert [line.partition(": ")[0] for line in dry.lines] == starts
    assert sorted(files.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_check_of_images_counts_classes(files):
    ended = well("check-data", "classification", "--images", files / "forms", "--dim", 16, "--size", 16)
    assert ended.lines[0].startswith("training: 8 examples; ")


def test_check_of_bad_data_is_an_error(files, tmp_path):
    ended = run("check-data", "translation", "--source", files / "none", "--target", files / "a.en")
    assert (ended.code, ended.out) == (2, "")
    ended = run("check-data", "translation", "--source", files / "news", "--target", files / "a.en")
    assert "the files must match line by line" in ended.err
