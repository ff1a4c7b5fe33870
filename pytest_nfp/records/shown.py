"""A record as it is shown: what would steer a terminal, a parser or a reading direction stands there as text."""

from __future__ import annotations

import json
import re

from pytest_nfp.escaping import shown_text
from pytest_nfp.records.schema import Record

# What `escaping` looks for, in JSON as it may be written with every character that is not escaped: where it finds nothing, there is nothing.
_SUSPECT = re.compile("\\\\[nrtbfu]|[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff]")


def shown(record: Record) -> Record:
    r"""The record with such characters written as escapes: a line end is `\n`, an override `\u202e`."""
    text = record.model_dump_json(by_alias=True)
    # Most records are plain, and a search of every character of a large one takes half a second.
    if (text.isascii() and "\\" not in text and "\x7f" not in text) or _SUSPECT.search(text) is None:
        return record
    return Record.model_validate_json(shown_text(json.dumps(record.model_dump(mode="json", by_alias=True))))
