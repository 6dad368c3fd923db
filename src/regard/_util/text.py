"""Text that is safe to print, and short enough."""

_JOINERS = "\u200c\u200d"  # they change how letters are written, and nothing else


def plain(text: str) -> str:
    """A line without the characters that a terminal obeys.

    >>> from regard._util.text import plain
    >>> plain("a\\tdog\\x1b[31m")
    'a dog�[31m'
    """
    return "".join(
        one if one.isprintable() or one in _JOINERS else " " if one.isspace() else "�" for one in text
    )


def shorten(text: str, most: int = 80) -> str:
    """A text of at most so many characters, which fits in a message or a line.

    >>> from regard._util.text import shorten
    >>> shorten("a long sentence", 7)
    'a long…'
    """
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
