"""Training state: what is due, what was best, why a run is over, and what a file may hold of it."""

import json
import math

import pytest

from regard.train import CheckpointError, Recipe, checkpoint
from regard.train.training_state import DATA, NUMBERS, WORST, TrainingState, evaluated_on_other, read

HIGHER = Recipe(steps=9, better="higher")
LOWER = Recipe(steps=9)


def scored(recipe, *values):
    state = TrainingState()
    for step, value in enumerate(values, 1):
        state.step = step
        state.score(value, recipe)
    return state


@pytest.mark.parametrize(
    ("recipe", "values", "best", "worse"),
    [
        (LOWER, (3.0, 1.0, 2.0), 2, 1),
        (HIGHER, (3.0, 1.0, 2.0), 1, 2),
        (LOWER, (1.0, 1.0), 1, 1),
        (LOWER, (math.nan, 5.0), 2, 0),
        (HIGHER, (math.nan, -math.inf), 1, 1),
        (LOWER, (), None, 0),
    ],
)
def test_the_best_is_the_first_of_the_lowest_scores_and_nan_the_worst(recipe, values, best, worse):
    state = scored(recipe, *values)
    assert (state.best, state.worse) == (best, worse)
    assert all(math.isfinite(score) for score in state.scores)


def test_the_lowest_score_is_told_as_it_was():
    assert TrainingState().lowest is None
    assert scored(LOWER, 2.0, 1.5).lowest == 1.5
    assert scored(LOWER, -math.inf).lowest == -math.inf
    assert math.isnan(scored(LOWER, math.nan).lowest)
    assert scored(LOWER, math.inf).scores == (WORST,)


def test_forgotten_scores_leave_no_best():
    state = scored(LOWER, 1.0)
    state.forget_scores()
    assert (state.best, state.lowest, state.worse, state.evaluated) == (None, None, 0, ())


@pytest.mark.parametrize(
    ("state", "recipe", "reason"),
    [
        (TrainingState(step=9, epoch=2), Recipe(steps=9, epochs=2), "steps"),
        (TrainingState(step=8, epoch=2), Recipe(steps=9, epochs=2), "epochs"),
        (scored(LOWER, 1.0, 2.0, 3.0), Recipe(steps=9, patience=2), "patience"),
        (scored(LOWER, 1.0, 2.0), Recipe(steps=9, patience=2), None),
        (TrainingState(step=8, epoch=99), Recipe(steps=9), None),
    ],
)
def test_a_run_is_over_by_steps_epochs_or_patience(state, recipe, reason):
    assert state.end_reason(recipe) == reason


def test_what_is_due_goes_by_steps_or_by_the_end_of_an_epoch():
    assert [step for step in range(7) if TrainingState(step=step, batch=1).due(3)] == [3, 6]
    assert TrainingState(step=4, epoch=1, batch=0).due(None)
    assert not TrainingState(step=4, batch=2).due(None)
    assert not TrainingState().due(None)


def test_numbers_of_another_type_are_refused():
    with pytest.raises(TypeError, match=r"step must be a whole number, got 1.5"):
        TrainingState(step=1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "was it written by another version"),
        ("[]", "was it written by another version"),
        ('{"format": 2, "state": {}, "batches": {}, "recipe": {}}', "does not have format 1; was it written by"),
        ('{"format": 1, "state": {}, "batches": {}}', "does not have format 1"),
        ('{"format": 1, "state": {"stp": 1}, "batches": {}, "recipe": {}}', "unknown key 'stp'; did you mean 'step'"),
        ('{"format": 1, "state": {}, "batches": {}, "recipe": {"stps": 1}}', "unknown key 'stps'; did you mean"),
    ],
)
def test_a_file_that_is_no_state_is_refused(tmp_path, text, message):
    checkpoint.write(tmp_path / "step-00000001", {NUMBERS: text})
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "step-00000001")


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({"valid": "a"}, {"valid": "b"}, True),
        ({"valid": "a", "train": 1}, {"valid": "a", "train": 2}, False),
        ({}, {"valid": "b"}, False),
        ([], {"valid": "b"}, False),
        ({"valid": "a"}, None, False),
        (None, {"valid": "b"}, False),
    ],
)
def test_evaluation_data_differ_only_if_both_records_name_them(tmp_path, before, now, differs):
    path = tmp_path / "step-00000001"
    checkpoint.write(path, {"config.json": "{}"} | ({} if before is None else {DATA: json.dumps(before)}))
    assert evaluated_on_other(path, {} if now is None else {DATA: json.dumps(now)}) is differs


def test_a_record_that_is_not_json_names_no_data(tmp_path):
    checkpoint.write(tmp_path / "step-00000001", {DATA: "notes"})
    assert not evaluated_on_other(tmp_path / "step-00000001", {DATA: '{"valid": "b"}'})
