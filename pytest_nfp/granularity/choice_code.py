"""Digests of the code that makes a choice, for choices that can't be evaluated.

Each function that the choice may reach has a digest. Two releases with the same code make the same choice, whichever
that is. Comments, docstrings, annotations and layout do not count as code.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterable, Mapping


def code_of(sources: Mapping[str, str], starts: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """(function, digest) of everything that is reached from the starts, sorted. A start is (module, name).

    The walk follows names of the same file, names imported from other files of the release, and attributes of imported
    modules. A class counts with its values and with those methods whose names are used anywhere on the way. A start
    that does not exist is left out.
    """
    walk = _Walk(sources)
    for module, name in starts:
        walk.reach(module, name)
    return tuple(sorted(walk.digests().items()))


class _Walk:
    """The definitions that were reached, and the names of the attributes that were used on the way."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._files: dict[str, dict[str, ast.stmt]] = {}
        self._reached: dict[tuple[str, str], ast.stmt] = {}
        self._used: set[str] = set()
        self._methods: dict[str, list[tuple[str, ast.ClassDef, ast.FunctionDef]]] = {}

    def reach(self, module: str, name: str) -> None:
        """Follow a name of a module, and everything that it uses."""
        waiting = [(module, name)]
        while waiting:
            module, name = waiting.pop()
            path = self._path(module)
            node = self._names(path).get(name) if path is not None else None
            if path is None or node is None:
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                waiting += self._imported(path, node, name)
                continue
            if (path, name) in self._reached:
                continue
            self._reached[path, name] = node
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef):
                        self._methods.setdefault(item.name, []).append((path, node, item))
                        if item.name in self._used or item.name.startswith("__"):
                            waiting += self._uses(path, item)
                    else:
                        waiting += self._uses(path, item)
                waiting += [use for base in node.bases for use in self._uses(path, base)]
            else:
                waiting += self._uses(path, node)

    def digests(self) -> dict[str, str]:
        """The digest of each function or value, by "file: name"."""
        digest_by_name = {}
        for (path, name), node in self._reached.items():
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and (item.name in self._used or item.name.startswith("__")):
                        digest_by_name[f"{path}: {name}.{item.name}"] = _digest(item)
                parts: list[ast.stmt] = [ast.Expr(b) for b in node.bases]
                parts += [i for i in node.body if isinstance(i, (ast.Assign, ast.AnnAssign))]
                digest_by_name[f"{path}: {name}"] = _digest(ast.Module(parts, []))
            else:
                digest_by_name[f"{path}: {name}"] = _digest(node)
        return digest_by_name

    def _uses(self, path: str, node: ast.AST) -> list[tuple[str, str]]:
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        uses = []
        for part in ast.walk(_bare(node)):
            if isinstance(part, ast.Name):
                uses.append((module, part.id))
            elif isinstance(part, ast.Attribute):
                if part.attr not in self._used:
                    self._used.add(part.attr)
                    for where, _, method in self._methods.get(part.attr, ()):
                        uses += self._uses(where, method)
                if isinstance(part.value, ast.Name):
                    target = self._names(path).get(part.value.id)
                    if isinstance(target, (ast.Import, ast.ImportFrom)):
                        uses += [
                            (f"{m}.{n}" if n else m, part.attr) for m, n in self._modules(path, target, part.value.id)
                        ]
            elif isinstance(part, ast.ImportFrom):
                base = _absolute(path, part.module or "", part.level)
                uses += [(base, a.name) for a in part.names]
        return uses

    def _imported(self, path: str, node: ast.stmt, name: str) -> list[tuple[str, str]]:
        if isinstance(node, ast.ImportFrom):
            base = _absolute(path, node.module or "", node.level)
            return [(base, a.name) for a in node.names if (a.asname or a.name) == name]
        return []

    def _modules(self, path: str, node: ast.stmt, name: str) -> list[tuple[str, str]]:
        """(package, module) pairs that an imported name may stand for."""
        if isinstance(node, ast.Import):
            return [(a.name, "") for a in node.names if (a.asname or a.name) == name]
        return self._imported(path, node, name)

    def _path(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in self._sources), None)

    def _names(self, path: str) -> dict[str, ast.stmt]:
        if path not in self._files:
            names: dict[str, ast.stmt] = {}
            try:
                body = ast.parse(self._sources[path]).body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                body = []
            for node in body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    names[node.name] = node
                elif isinstance(node, ast.Assign):
                    names |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names[node.target.id] = node
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    names |= {a.asname or a.name: node for a in node.names}
            self._files[path] = names
        return self._files[path]


def _absolute(path: str, module: str, level: int) -> str:
    if not level:
        return module
    parts = path.removesuffix(".py").split("/")[:-level]
    return ".".join([*parts, *([module] if module else [])])


def _bare(node: ast.AST) -> ast.AST:
    """A copy without docstrings and annotations."""
    bare = copy.deepcopy(node)
    for part in ast.walk(bare):
        if isinstance(part, ast.arg):
            part.annotation = None
        elif isinstance(part, ast.FunctionDef):
            part.returns = None
        elif isinstance(part, ast.AnnAssign):
            part.annotation = ast.Constant(None)
        body = getattr(part, "body", None)
        if isinstance(body, list):
            part.body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]  # type: ignore[attr-defined]
    return bare


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.dump(_bare(node)).encode()).hexdigest()[:12]
