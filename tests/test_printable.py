"""Text of others, made safe to print."""

from regard.printable import printable


def test_control_characters_are_escaped_and_letters_are_kept():
    assert printable("Käse 猫 \x1b[2J\n\t") == "Käse 猫 \\x1b[2J\\n\\t"
