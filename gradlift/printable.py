"""Users' text, such as a module's name or a reason in a checkpoint, as it may be printed."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text on one line. Control characters, those that turn the writing direction among
    them, are spelled out: they would rewrite the line they are printed in."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(name: str, width: int = 80) -> str:
    """Return a name in at most ``width`` characters, ``printable`` and cut in the middle."""
    shown = printable(name)
    if len(shown) <= width:
        return shown
    head = (width - 1) // 2
    return f"{shown[:head]}…{shown[len(shown) - (width - 1 - head) :]}"
