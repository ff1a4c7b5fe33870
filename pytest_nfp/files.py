"""Reading and writing files: atomic writes, and YAML whose errors name file, line and field."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_nfp.escaping import Shown, shortened

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)


DEEPEST = 100
"""Lists and objects in one another in YAML."""
MOST_PROBLEMS, LONGEST_VALUE = 10, 60
"""Problems of one file that a message has, and characters of a value in it."""


class FileError(Shown):
    """A file that can't be used; the message says which, where and what to do."""


def parse_json(text: str | bytes) -> Any:
    """JSON as everybody reads it. Raises ValueError: for what is none, nests too deeply, or has a name twice in one object."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object: readers differ in which of them counts")
    return found


def finite(value: float | None) -> float | None:
    """A number that JSON can hold: None for infinity, and for none."""
    return round(value, 2) if value is not None and math.isfinite(value) else None


def write_atomically(path: Path, text: str) -> None:
    """Write through a temporary file in the same folder, so that a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
        # mkstemp makes the file private; a report or a baseline is as readable as any other file here.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_yaml(path: Path, model: type[Model], is_shipped: bool = False) -> Model:
    """A YAML file checked against its schema. Raises FileError with file, line and field.

    is_shipped: the file comes with this package, so libyaml may read it, which is ten times as fast. Its recursion has no
    guard, so files from elsewhere are read in Python.
    """
    import yaml
    from pydantic import ValidationError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    if _deepest(text) > DEEPEST:
        raise FileError(f"{path}: broken YAML: lists or objects are nested more than {DEEPEST} deep")
    try:
        if is_shipped and yaml.__with_libyaml__:
            data = yaml.load(text, Loader=yaml.CSafeLoader)
        else:
            data = yaml.safe_load(text)
    except (RecursionError, OverflowError) as error:
        raise FileError(f"{path}: broken YAML: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{mark.line + 1}" if mark else "?"
        raise FileError(f"{path}:{line}: broken YAML: {getattr(error, 'problem', error)}") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        problems = [
            f"{path}:{_line(root, e['loc'])}: {'.'.join(str(p) for p in e['loc']) or 'file'}: {e['msg']}"
            + (
                ""
                if e["type"] == "missing" or isinstance(e["input"], dict | list)
                else f" (got {shortened(repr(e['input']), LONGEST_VALUE)})"
            )
            for e in error.errors(include_url=False)[:MOST_PROBLEMS]
        ]
        raise FileError("\n".join([*problems, *_further(error)])) from error


def _deepest(text: str) -> int:
    """How deep brackets are nested at the most, whatever they stand in: the parser's time grows with the square of it."""
    depth = deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def read_json(path: Path, model: type[Model]) -> Model:
    """A JSON file checked against its schema. Raises FileError with file and field."""
    from pydantic import ValidationError

    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    except ValidationError as error:
        found = error.errors(include_url=False)[:MOST_PROBLEMS]
        problems = [f"{path}: {'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in found]
        raise FileError("\n".join([*problems, *_further(error)])) from error


def _further(error: ValidationError) -> list[str]:
    more = error.error_count() - MOST_PROBLEMS
    return [f"and {more} more like these"] if more > 0 else []


def _line(node: Any, location: tuple[int | str, ...]) -> int:
    """The line of the deepest node on the way to a schema error's location."""
    import yaml

    line = 1
    for part in location:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = (node.value[part], node.value[part])
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
