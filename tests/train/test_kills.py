"""Runs that are killed, stopped and resumed end, byte for byte, as the run that was not."""

import random
import re
import signal

import pytest

from tests.train.small_run import DROPS, RECIPE, remains

pytestmark = pytest.mark.kills

EVENTS, SAVING = 26_000, 9_000  # calls and returns of a whole run within the library, and within its saves, about


def hunt(nursery, scratch, uninterrupted, *, kills, number, exits, first=1):
    """Send a signal at random points until it has hit `kills` times, resuming each time and letting some runs end.

    A third of them come by the clock: on a slow machine before there is anything to resume from.
    """
    draw, hits, inside, resumed, runs = random.Random(kills), 0, 0, 0, 0
    while hits < kills:
        folder, runs = scratch / str(runs), runs + 1
        for chapter in range(draw.randint(1, 6)):
            whens = (
                {"seconds": draw.uniform(0.1, 0.8)},
                {"event": draw.randint(first, EVENTS // 3)},
                {"event": draw.randint(1, SAVING // 3), "saving": True},
            )
            when = whens[hits % 3]
            answer = nursery.run(folder, resume=chapter > 0, signal=number, **when)
            resumed += "resuming from" in answer["said"]
            if answer["code"] == 0:
                break
            assert answer["code"] in exits, answer
            hits += 1
            inside += "while saving" in answer["said"]
        else:
            answer = nursery.run(folder, resume=True)
        assert answer["code"] == 0, answer
        assert remains(folder) == uninterrupted
    return inside, resumed


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_run_killed_at_random_points_ends_as_if_it_never_was(nursery, scratch, uninterrupted, kills):
    inside, resumed = hunt(nursery, scratch, uninterrupted, kills=kills, number=signal.SIGKILL, exits=(-9,))
    assert inside >= kills // 5  # a kill inside a save is the one that leaves something torn
    assert resumed >= kills // 3


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_run_terminated_at_random_points_ends_as_if_it_never_was(nursery, scratch, uninterrupted, kills):
    # A signal before the run has begun to listen ends the process the plain way.
    _, resumed = hunt(nursery, scratch, uninterrupted, kills=kills, number=signal.SIGTERM, exits=(143, -15), first=300)
    assert resumed >= kills // 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_the_step_it_came_in_and_exits(nursery, scratch, uninterrupted, number, code):
    answer = nursery.run(scratch / "run", kill_at_step=7, signal=number)
    assert answer["code"] == code
    assert re.search(r"stopped at step 7; saved, resume from .*run", answer["said"])
    assert (scratch / "run" / "step-00000007" / "model.safetensors").exists()
    assert nursery.run(scratch / "run", resume=True)["code"] == 0
    finished = remains(scratch / "run")
    assert finished == uninterrupted


@pytest.mark.parametrize("forgotten", DROPS)
def test_resume_that_forgets_anything_ends_elsewhere(nursery, scratch, uninterrupted, forgotten):
    assert nursery.run(scratch / "run", kill_at_step=13, signal=signal.SIGKILL)["code"] == -9
    assert nursery.run(scratch / "run", resume=True, drop=forgotten)["code"] == 0
    weights = f"step-{RECIPE.steps:08d}/model.safetensors"
    same = remains(scratch / "run")[weights] == uninterrupted[weights]
    assert same == (forgotten == "nothing")


def test_resuming_a_finished_run_changes_nothing(nursery, scratch, uninterrupted):
    folders = []
    for resume in (False, True):
        assert nursery.run(scratch / "run", resume=resume)["code"] == 0
        assert remains(scratch / "run") == uninterrupted
        folders.append([path.stat().st_ino for path in sorted((scratch / "run").glob("step-*"))])
    assert folders[0] == folders[1]  # not even written again, for that takes the old one away first
