"""Every character is seen: in a font that has it, or as its code point."""

import warnings

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg

from regard.views import glyphs, heatmap, text
from regard.views.glyphs import shown

USUAL = "DejaVu Sans"


@pytest.fixture
def only_shipped(monkeypatch):
    """The fonts that come with matplotlib, whatever this machine has."""
    fonts = [font for font in font_manager.fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    glyphs._families.cache_clear()
    yield
    glyphs._families.cache_clear()


def test_usual_text_stays_in_the_usual_font(only_shipped):
    assert shown(["the", "Привет", "äß", "▁the", "Ġa"]) == (["the", "Привет", "äß", "▁the", "Ġa"], [USUAL])


def test_a_character_the_usual_font_lacks_is_found_in_another(only_shipped):
    assert shown(["a", "⥛"]) == (["a", "⥛"], [USUAL, "DejaVu Serif"])
    assert shown(["〒"]) == (["〒"], [USUAL, "STIXGeneral"])


def test_a_character_no_font_has_is_shown_as_its_code_point(only_shipped):
    assert shown(["猫x", "\U00020000"]).texts == ["\\u732bx", "\\U00020000"]
    assert not any(family.startswith("Last Resort") for family in shown(["猫"]).families)


def test_invisible_characters_are_shown_as_escapes():
    assert shown(["\n", "a\tb", "\u200b", "\u202e", "\ufeff", "\x00", "\u2028", "\ud800"]).texts == [
        "\\n",
        "a\\tb",
        "\\u200b",
        "\\u202e",
        "\\ufeff",
        "\\u0000",
        "\\u2028",
        "\\ud800",
    ]
    assert shown(["  ", "", " a"]).texts == ["␣␣", "", " a"]


def test_no_figure_meets_a_missing_glyph_or_reads_dollars_as_formulas(only_shipped):
    tokens = ["我", "喜欢", "猫", "$x^", "\\frac", "مرحبا", "हिन्दी", "한국어", "🙂", "\x1b"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (heatmap(np.eye(10), tokens, title="$猫"), text(np.eye(10), tokens)):
            FigureCanvasAgg(figure).draw()
