"""Hostile versions of an example: its bytes edited, or a value of its JSON or YAML put in another's place."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import strategies as st

MOST_CHARACTERS = 1 << 20
"""Of a list that is repeated."""
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        0.5,
        1e308,
        10**400,
        -(10**30),
        2**63,
        "",
        "x",
        "x" * 5000,
        "\x1b[31m",
        "\u202e",
        "\0",
        "nan",
        "1e999",
        "9" * 400,
    ),
    *(
        [],
        {},
        [[]],
        [[[[[[]]]]]],
        {"a": 1},
        float("nan"),
        float("inf"),
        "../../etc/passwd",
        "${x}",
        "<script>",
        "=1+1",
        "!!python/name:os.system",
    ),
)


@st.composite
def edited(draw: st.DrawFn, example: bytes) -> bytes:
    """Some bytes changed, cut, repeated or put in between."""
    data = bytearray(example)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0:
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del data[at : at + draw(st.integers(1, 200))]
            case 2:
                data[at:at] = draw(
                    st.binary(max_size=20)
                    | st.sampled_from([b"9" * 400, b"[" * 3000, b'"', b"\n", b",", b"\xff", b"1e999"])
                )
            case _:
                data[at:at] = data[: draw(st.integers(0, len(data)))]
    return bytes(data)


@st.composite
def replaced(draw: st.DrawFn, example: Any) -> Any:
    """A parsed value with some of its parts replaced, removed or repeated."""
    if draw(st.integers(0, 9)) == 0 or not isinstance(example, dict | list) or not example:
        return draw(st.sampled_from(VALUES))
    if isinstance(example, list):
        made = list(example)
        at = draw(st.integers(0, len(made) - 1))
        made[at] = draw(replaced(made[at]))
        times = draw(st.sampled_from((1, 1, 1, 2, 300)))
        # Lists in lists in lists, each 300 times, would be an input that no file system holds.
        return made * (times if len(json.dumps(made)) * times < MOST_CHARACTERS else 1)
    changed = dict(example)
    for name in draw(st.lists(st.sampled_from(list(example)), min_size=1, max_size=3)):
        match draw(st.integers(0, 4)):
            case 0:
                changed.pop(name, None)
            case 1:
                changed[name + draw(st.sampled_from(("", "_", "\0")))] = draw(st.sampled_from(VALUES))
            case _:
                changed[name] = draw(replaced(example[name]))
    return changed


def hostile(example: bytes, suffix: str) -> st.SearchStrategy[bytes]:
    """Bytes that a reader of files with this suffix may be given."""
    strategies: list[st.SearchStrategy[bytes]] = [edited(example), st.binary(max_size=300)]
    if suffix in (".json", ""):
        strategies.append(replaced(json.loads(example)).map(lambda v: json.dumps(v).encode()))
    elif suffix == ".jsonl":
        lines = [json.loads(line) for line in example.splitlines()]
        strategies.append(
            replaced(lines).map(lambda v: "\n".join(map(json.dumps, v if isinstance(v, list) else [v])).encode())
        )
    elif suffix == ".yaml":
        strategies.append(
            replaced(yaml.safe_load(example)).map(
                lambda v: yaml.safe_dump(v, allow_unicode=True).encode(errors="replace")
            )
        )
    return st.one_of(strategies)
