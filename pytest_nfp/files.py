"""Reading and writing files: atomic writes, and YAML whose errors name file, line and field."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)


class FileError(Exception):
    """A file that can't be used; the message says which, where and what to do."""


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


def read_yaml(path: Path, model: type[Model]) -> Model:
    """A YAML file checked against its schema. Raises FileError with file, line and field."""
    import yaml
    from pydantic import ValidationError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    try:
        data = yaml.safe_load(text)
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
            + ("" if e["type"] == "missing" or isinstance(e["input"], dict | list) else f" (got {e['input']!r})")
            for e in error.errors(include_url=False)
        ]
        raise FileError("\n".join(problems)) from error


def read_json(path: Path, model: type[Model]) -> Model:
    """A JSON file checked against its schema. Raises FileError with file and field."""
    from pydantic import ValidationError

    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors(include_url=False)]
        raise FileError("\n".join(f"{path}: {problem}" for problem in problems)) from error


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
