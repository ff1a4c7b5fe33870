"""Text that can do no harm: what would steer a terminal, a parser or a reading direction stands there as text."""

from __future__ import annotations

import json
import re

# In JSON text of ASCII alone: control characters, line and paragraph separators, marks and overrides of direction, byte order.
_STEERING = re.compile(
    r"(?<!\\)((?:\\\\)*)\\(n|r|t|b|f|u(?:00[01][0-9a-f]|007f|00[89][0-9a-f]|061c|200[b-f]|202[89a-e]|206[0-9]|feff|fff[ef]))"
)


def shown_text(text: str) -> str:
    """JSON text of ASCII whose strings have such characters written as escapes."""
    return _STEERING.sub(r"\1\\\\\2", text)


def shown_line(text: str) -> str:
    """One text, such as a line for a terminal."""
    found: str = json.loads(shown_text(json.dumps(text)))
    return found


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; a longer one ends in dots."""
    return text if len(text) <= most else f"{text[:most]} ..."


LONGEST_MESSAGE = 4000
"""Characters of an error's message: what it quotes may be a file's."""


class Shown(Exception):
    """An error whose message may quote what others wrote: shown without what would steer a terminal, and not without end."""

    def __str__(self) -> str:
        lines = [shortened(shown_line(line), LONGEST_MESSAGE // 2) for line in super().__str__().split("\n")]
        return shortened("\n".join(lines), LONGEST_MESSAGE)
