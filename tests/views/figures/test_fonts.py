"""Every character is seen: in a font that has it, or as its code point."""

import warnings

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg

from regard.views import heatmap, text
from regard.views.figures import fonts as fonts_module
from regard.views.figures.fonts import drawable

USUAL, EAST_ASIAN = "DejaVu Sans", "Noto Sans CJK JP"


@pytest.fixture
def only_shipped(monkeypatch):
    """The fonts that come with matplotlib, whatever this machine has."""
    fonts = [font for font in font_manager.fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    fonts_module._families.cache_clear()
    yield
    fonts_module._families.cache_clear()


def test_usual_text_stays_in_the_usual_font(only_shipped):
    assert drawable(["the", "Привет", "äß", "▁the", "Ġa"]) == (["the", "Привет", "äß", "▁the", "Ġa"], [USUAL])


def test_a_character_the_usual_font_lacks_is_found_in_another(only_shipped):
    assert drawable(["a", "⥛"]) == (["a", "⥛"], [USUAL, "DejaVu Serif"])
    assert drawable(["〒"]) == (["〒"], [USUAL, EAST_ASIAN])


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(["2024年", "11月", "15日", "（金）", "ヴェー", "ゐ"], id="Japanese"),
        pytest.param(["我", "喜欢", "猫", "，", "说汉语"], id="simplified Chinese"),
        pytest.param(["我", "喜歡", "貓", "說漢語", "龘"], id="traditional Chinese"),
        pytest.param(["2024년", "11월", "금요일", "뷁", "ㅋㅋ"], id="Korean"),
        pytest.param(["Привет", "Καλημέρα", "مرحبا", "שלום", "გამარჯობა", "日本"], id="alphabets"),
    ],
)
def test_scripts_of_many_are_drawn_with_the_fonts_that_come_along(only_shipped, tokens):
    texts, families = drawable(tokens)
    assert texts == tokens
    assert set(families) <= {USUAL, EAST_ASIAN}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of a glyph that is missing
        FigureCanvasAgg(heatmap(np.eye(len(tokens)), tokens)).draw()


def test_without_the_package_of_the_font_characters_are_spelled(only_shipped, monkeypatch):
    monkeypatch.setattr(fonts_module, "_bundled_font", lambda: None)
    assert drawable(["猫x"]).texts == ["\\u732bx"]


def test_a_character_no_font_has_is_shown_as_its_code_point(only_shipped):
    assert drawable(["ᚠx", "ꦗ", "\U00012000"]).texts == ["\\u16a0x", "\\ua997", "\\U00012000"]
    assert not any(family.startswith("Last Resort") for family in drawable(["ꦗ"]).families)


def test_invisible_characters_are_shown_as_escapes():
    assert drawable(["\n", "a\tb", "\u200b", "\u202e", "\ufeff", "\x00", "\u2028", "\ud800"]).texts == [
        "\\n",
        "a\\tb",
        "\\u200b",
        "\\u202e",
        "\\ufeff",
        "\\u0000",
        "\\u2028",
        "\\ud800",
    ]
    assert drawable(["  ", "", " a"]).texts == ["␣␣", "", " a"]


def test_emoji_are_drawn_or_named_without_their_joiners(only_shipped):
    joined = [
        "\U0001f469\u200d\U0001f4bb!",
        "\U0001f44d\U0001f3fd",
        "\U0001f9d1\u200d\U0001f91d\u200d\U0001f9d1",
        "☀\ufe0f",
    ]
    assert drawable(joined).texts == ["[woman+personal computer]!", "[thumbs up sign]", "[adult+handshake+adult]", "☀"]
    assert drawable(["a\u200db", "\u200d\U0001f469"]).texts == ["a\\u200db", "\\u200d[woman]"]  # joins nothing


def test_no_figure_meets_a_missing_glyph_or_reads_dollars_as_formulas(only_shipped):
    tokens = ["我", "喜欢", "猫", "$x^", "\\frac", "مرحبا", "हिन्दी", "한국어", "🙂", "\x1b"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (heatmap(np.eye(10), tokens, title="$猫"), text(np.eye(10), tokens)):
            FigureCanvasAgg(figure).draw()


def test_long_names_are_cut_and_leave_the_map_its_size(only_shipped):
    long = heatmap(np.eye(3), ["ꦗ" * 9, "b" * 30, "c" * 22 + "\n"])
    FigureCanvasAgg(long).draw()
    # Never within a character's code point.
    names = ["\\ua997" * 3 + "…", "b" * 23 + "…", "c" * 22 + "\\n"]
    assert [name.get_text() for name in long.axes[0].get_yticklabels()] == names
    short = heatmap(np.eye(3), ["a", "b", "c"])
    FigureCanvasAgg(short).draw()
    size = [figure.axes[0].get_window_extent().size for figure in (long, short)]
    assert np.allclose(*size, rtol=0.15)
