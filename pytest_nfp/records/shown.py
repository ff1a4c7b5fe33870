"""A record as it is shown: characters that steer a terminal, a parser or the reading direction are escaped."""

from __future__ import annotations

import json
import re

from pytest_nfp.escaping import shown_text
from pytest_nfp.records.schema import Record

# The characters that `escaping` escapes, as they may appear in JSON: as an escape, or as themselves.
# Without a match there is nothing to escape.
_SUSPECT = re.compile("\\\\[nrtbfu]|[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff]")


def shown(record: Record) -> Record:
    r"""The record with these characters written as escapes: a line end as `\n`, a direction override as `\u202e`."""
    text = record.model_dump_json(by_alias=True)
    # Most records are plain ASCII. Searching every character of a large record takes half a second.
    if (text.isascii() and "\\" not in text and "\x7f" not in text) or _SUSPECT.search(text) is None:
        return record
    return Record.model_validate_json(shown_text(json.dumps(record.model_dump(mode="json", by_alias=True))))
