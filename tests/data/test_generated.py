"""Data made on the spot: the same for a seed, right by definition, and kept apart for testing."""

import datetime
import pickle
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import Arithmetic, Copy, Dates, Generated, Recall, Reverse, Scenes, Sort
from regard.data.dates import FORMATS, LOCALES, UNSEEN_FORMATS, UNSEEN_LOCALES, is_held_out, is_unambiguous, write
from regard.data.shapes import COLOURS, FORMS

MAKERS = [Copy(), Reverse(), Sort(), Recall(), Arithmetic(), Dates(), Scenes()]


def same(one, other):
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", MAKERS, ids=repr)
def test_examples_are_the_same_for_a_seed_in_any_order_and_process(make):
    made = Generated(make, size=20, seed=1)
    forward = [made[n] for n in range(20)]
    again = pickle.loads(pickle.dumps(Generated(make, size=20, seed=1)))
    assert all(same(again[n], forward[n]) for n in reversed(range(20)))
    assert all(same(a, b) for a, b in zip(made, forward, strict=True))
    assert same(made[-1], forward[19])
    assert not all(same(a, b) for a, b in zip(Generated(make, size=20, seed=2), forward, strict=True))


def test_examples_do_not_touch_the_global_generators():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    for make in MAKERS:
        Generated(make, size=1)[0]
    assert random.random() == expected


def test_sizes_that_cannot_be_say_why():
    for size in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"size must be a whole number of examples, at least 1, got"):
            Generated(Copy(), size=size)
    with pytest.raises(IndexError, match=r"there is no example 5: there are 5, counted from 0"):
        Generated(Copy(), size=5)[5]
    assert len(Generated(Copy(), size=10**12)) == 10**12
    assert Generated(Copy(), size=10**12)[10**12 - 1].source


@given(seed=st.integers(0, 10**6), longest=st.integers(1, 20))
def test_letter_tasks_are_what_they_say(seed, longest):
    for make, rule in ((Copy, list), (Reverse, lambda letters: letters[::-1]), (Sort, sorted)):
        source, target = make(longest=longest)(random.Random(seed))
        assert target.split(" ") == rule(source.split(" "))
        assert 1 <= len(source.split(" ")) <= longest


@given(seed=st.integers(0, 10**6), longest=st.integers(1, 26))
def test_recall_asks_for_a_value_it_was_told(seed, longest):
    source, target = Recall(longest=longest)(random.Random(seed))
    told, asked = source.split(" ? ")
    cells = told.split(" ")
    assert len(cells) == 2 * len(set(cells[::2])) <= 2 * longest
    assert dict(zip(cells[::2], cells[1::2], strict=True))[asked] == target


@given(seed=st.integers(0, 10**6), digits=st.integers(1, 5), operations=st.sampled_from(["+", "-", "*", "+-", "+-*"]))
def test_arithmetic_is_right(seed, digits, operations):
    source, target = Arithmetic(digits=digits, operations=operations)(random.Random(seed))
    text = source.replace(" ", "")
    sign = next(sign for sign in operations if sign in text[1:])
    a, b = map(int, text.split(sign))
    assert max(a, b) < 10**digits
    assert int(target.replace(" ", "")) == {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert all(len(symbol) == 1 for symbol in (source + " " + target).split(" "))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Copy(shortest=3, longest=2), "shortest and longest must be at least 1, in that order, got 3 and 2"),
        (lambda: Sort(shortest=0), "must be at least 1, in that order, got 0 and 12"),
        (lambda: Recall(longest=27), "shortest and longest must lie in 1 to 26, in that order, got 1 and 27"),
        (lambda: Arithmetic(digits=0), "digits must be at least 1, got 0"),
        (lambda: Arithmetic(operations="+/"), r"operations must be one or more of '\+', '-' and '\*', got '\+/'"),
        (lambda: Arithmetic(operations=""), "operations must be one or more of"),
        (lambda: Dates(part="dev"), "part must be one of train, test, locales, formats, got 'dev'"),
        (lambda: Dates(locales=("tlh",)), "unknown locale 'tlh'; choose from en, en_GB"),
        (lambda: Dates(formats=("short",)), "unknown format 'short'; choose from full, long"),
        (lambda: Dates(locales=("en",), formats=("yMd",)), "no format of .* is unambiguous in .*; add 'long'"),
        (lambda: Scenes(pixels=8), "pixels must be at least 16 for shapes to be distinguishable, got 8"),
        (lambda: Scenes(most=3), "most must be 1 or 2 shapes per scene, got 3"),
    ],
)
def test_tasks_that_cannot_be_say_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_dates_speak_many_languages_in_several_formats():
    assert len({locale.split("_")[0] for locale in LOCALES}) >= 16
    for locale in LOCALES + UNSEEN_LOCALES:
        texts = {write(datetime.date(2003, 2, 25), locale, form) for form in FORMATS if is_unambiguous(locale, form)}
        assert len(texts) >= 3
        assert is_unambiguous(locale, UNSEEN_FORMATS[0])


def test_each_date_text_means_one_day():
    meaning = {}
    forms = [(locale, form) for locale in LOCALES + UNSEEN_LOCALES for form in FORMATS + UNSEEN_FORMATS]
    forms = [pair for pair in forms if is_unambiguous(*pair)]
    for year, step in ((2003, 1), (1903, 11), (2012, 11)):
        for n in range(0, 365, step):
            day = datetime.date(year, 1, 1) + datetime.timedelta(n)
            for locale, form in forms:
                assert meaning.setdefault(write(day, locale, form), day) == day


def test_dates_for_testing_are_never_trained_on():
    parts = {part: [Dates(part=part)(random.Random(n)) for n in range(400)] for part in PARTS}
    for part, made in parts.items():
        assert {is_held_out(datetime.date.fromisoformat(one.target)) for one in made} == {part != "train"}
    assert {one.locale for one in parts["train"]} == {one.locale for one in parts["test"]} == set(LOCALES)
    assert {one.locale for one in parts["locales"]} == set(UNSEEN_LOCALES)
    assert {one.format for one in parts["formats"]} == set(UNSEEN_FORMATS)
    assert not set(LOCALES) & set(UNSEEN_LOCALES)
    assert {one.format for one in parts["train"]} == set(FORMATS)
    share = np.mean([is_held_out(datetime.date(2000, 1, 1) + datetime.timedelta(n)) for n in range(3000)])
    assert 0.08 < share < 0.12


PARTS = ("train", "test", "locales", "formats")


def test_dates_are_written_as_people_do():
    day = datetime.date(2003, 2, 5)
    assert write(day, "de", "full") == "Mittwoch, 5. Februar 2003"
    assert write(day, "fr", "yMd") == "05/02/2003"
    assert write(day, "ja", "long") == "2003年2月5日"
    made = Dates(locales=("fr",), formats=("long",))(random.Random(0))
    assert (made.locale, made.format) == ("fr", "long")
    assert made.source == write(datetime.date.fromisoformat(made.target), "fr", "long")


@pytest.mark.parametrize("pixels", [16, 32, 49])
def test_scenes_show_what_their_captions_say(pixels):
    words = Counter()
    for scene in Generated(Scenes(pixels=pixels), size=300):
        assert scene.image.shape == (pixels, pixels, 3)
        assert scene.image.dtype == np.uint8
        assert scene.caption.startswith(scene.shapes[0].name)
        assert scene.caption.endswith(scene.shapes[-1].name)
        words.update(scene.caption.split())
        for shape in scene.shapes:
            left, top, right, bottom = shape.box
            assert 0 <= left < right <= pixels
            assert 0 <= top < bottom <= pixels
            # The middle of every form is filled with its colour.
            middle = scene.image[(top + bottom) // 2, (left + right) // 2].astype(int)
            assert np.abs(middle - COLOURS[shape.colour]).max() <= 16
        outside = np.ones((pixels, pixels), bool)
        for left, top, right, bottom in (shape.box for shape in scene.shapes):
            outside[top:bottom, left:right] = False
        assert scene.image[outside].max() <= 50
    assert set(words) == {"a", "small", "large", "left", "of", "above", *COLOURS, *FORMS}


def test_captions_of_scenes_are_beyond_doubt():
    for scene in Generated(Scenes(), size=500):
        if len(scene.shapes) == 1:
            continue
        first, second = (np.array(shape.box).reshape(2, 2) for shape in scene.shapes)
        across, down = second.mean(0) - first.mean(0)
        beside = " left of " in scene.caption
        assert (across if beside else down) > 2 * abs(down if beside else across)
        # Boxes do not overlap.
        assert (first[1] <= second[0]).any()


def test_the_four_forms_look_different():
    filled = {}
    for scene in Generated(Scenes(most=1), size=200, seed=5):
        (shape,) = scene.shapes
        left, top, right, bottom = shape.box
        part = scene.image[top:bottom, left:right].astype(int)
        own = np.abs(part - COLOURS[shape.colour]).max(-1) < 40
        filled.setdefault((shape.size, shape.form), []).append(own.mean())
    for size in ("small", "large"):
        triangle, cross, circle, square = (
            np.mean(filled[size, form]) for form in ("triangle", "cross", "circle", "square")
        )
        assert triangle < cross < circle < square == 1
