"""Text of others, made safe to print on a terminal."""


def printable(line: str) -> str:
    """Escape control characters: names of classes and files come from users and must not control the terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
