"""A record as it is shown: what would steer a terminal, a parser or a reading direction stands there as text."""

from __future__ import annotations

import json
import re

from pytest_nfp.records import Record

# In JSON text of ASCII alone: control characters, line and paragraph separators, marks and overrides of direction, byte order.
_STEERING = re.compile(
    r"(?<!\\)((?:\\\\)*)\\(n|r|t|b|f|u(?:00[01][0-9a-f]|007f|00[89][0-9a-f]|061c|200[b-f]|202[89a-e]|206[0-9]|feff|fff[ef]))"
)
# The same in JSON as it may be written with every character that is not escaped: where it finds nothing, there is nothing.
_SUSPECT = re.compile("\\\\[nrtbfu]|[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff]")


def shown_text(text: str) -> str:
    """JSON text of ASCII whose strings have such characters written as escapes."""
    return _STEERING.sub(r"\1\\\\\2", text)


def shown_line(text: str) -> str:
    """One text, such as a line for a terminal."""
    found: str = json.loads(shown_text(json.dumps(text)))
    return found


def shown(record: Record) -> Record:
    r"""The record with such characters written as escapes: a line end is `\n`, an override `\u202e`."""
    text = record.model_dump_json(by_alias=True)
    # Most records are plain, and a search of every character of a large one takes half a second.
    if (text.isascii() and "\\" not in text and "\x7f" not in text) or _SUSPECT.search(text) is None:
        return record
    return Record.model_validate_json(shown_text(json.dumps(record.model_dump(mode="json", by_alias=True))))
