"""Runs inside a separate, isolated interpreter: lifts a framework's rule from its source and evaluates it.

Started as `python -I -S sandbox.py` in an empty folder, with a JSON request on standard input and JSON answers on standard output,
a line each. It imports the standard library alone, and loads confinement.py from beside it.

Two kinds of walls. In the language: every tree that is compiled passes `check`, an allow-list of syntax and names; the rule
runs with whitelisted builtins and stubs for what it may call; its only files are the texts of the request. By the system:
what confinement.py puts up before the first foreign line. Attributes of stubs that a rule must not see have names with two
underscores inside, which no rule can write or ask for.
"""

import ast
import builtins
import collections
import copy
import dataclasses
import enum
import functools
import importlib.util
import inspect
import json
import math
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

SAFE_BUILTINS = [
    "abs",
    "all",
    "any",
    "bool",
    "dict",
    "divmod",
    "enumerate",
    "filter",
    "float",
    "frozenset",
    "int",
    "isinstance",
    "issubclass",
    "iter",
    "len",
    "list",
    "map",
    "max",
    "min",
    "next",
    "object",
    "range",
    "reversed",
    "round",
    "set",
    "sorted",
    "str",
    "sum",
    "tuple",
    "zip",
    "True",
    "False",
    "None",
    "ValueError",
    "TypeError",
    "KeyError",
    "AssertionError",
    "RuntimeError",
    "Exception",
    "NotImplementedError",
    "OSError",
    "FileNotFoundError",
    "print",
    "property",
    "repr",
    "staticmethod",
    "classmethod",
]
ALLOWED_DUNDERS = {"__file__", "__version__", "__name__", "__init__", "__post_init__"}
OPERATORS = {f"__{n}__" for n in ("init", "post_init", "eq", "ne", "lt", "le", "gt", "ge", "hash", "len")} | {
    f"__{n}__" for n in ("iter", "contains", "getitem", "bool", "call", "or", "ror", "and", "add")
}
"""Special methods that a class of a rule may define; others, such as __getattribute__, are left out."""
INNER = frozenset(
    {"format", "format_map", "mro", "func_globals", "with_traceback"}
    | {f"{kind}_{part}" for kind in ("gi", "cr", "ag") for part in ("frame", "code", "yieldfrom", "await", "origin")}
    | {f"tb_{part}" for part in ("frame", "next", "lasti", "lineno")}
    | {f"f_{part}" for part in ("back", "builtins", "code", "globals", "locals", "lasti", "lineno", "trace")}
    | {f"co_{part}" for part in ("code", "consts", "names", "varnames", "freevars", "cellvars", "positions", "lines")}
)
"""Public names that lead from a value to the interpreter, and `format`, which looks up attributes that its text names."""
DUNDER = re.compile(r"__\w+__")
VALUES: tuple[Any, ...] = (object(), type, len, sys._getframe(), sys._getframe().f_code, sys, property(), iter(()))
SPECIAL = frozenset(name for value in VALUES for name in (*dir(value), *dir(type(value))) if name.startswith("__")) | {
    f"__{n}__" for n in ("import", "builtins", "traceback", "cause", "context", "wrapped", "globals", "func")
}
"""Names with which a text leads somewhere: those that values of the interpreter have. Others are a release's own."""
NOT_COUNTS = {"triton_version"}
"""Keys of a tuned file that stand beside its token counts."""
LARGEST_PART = 1 << 16
"""Rows of a tile: what is larger is no answer."""
LONGEST_PARAMETERS = 400
"""Characters of the other parameters of a configuration: real ones have fewer than a hundred."""


class Refused(Exception):
    """The source asks for something that a granularity rule has no need of."""


class NameAsked(BaseException):
    """A choice compares the device's name, which a question for several devices does not give. `except Exception` lets it pass."""


def _asked(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise NameAsked


class Unnamed(str):
    """The name of a device in a question for all devices of one compute capability: to be printed, not to be compared."""

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __getitem__ = __iter__ = _asked
    __hash__ = _asked
    startswith = endswith = find = index = count = lower = upper = casefold = strip = split = replace = partition = (
        _asked
    )
    encode = join = title = removeprefix = removesuffix = rpartition = lstrip = rstrip = rfind = splitlines = _asked


class Missing:
    """Stands for a name that has no stub: any use of it says which name was missing."""

    def __init__(self, name: str) -> None:
        self.own__name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # Python itself asks: whether a value is a descriptor, a type, ...
        raise Refused(f"the rule uses {self.own__name}.{attribute}, for which there is no stub")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(f"the rule calls {self.own__name}, for which there is no stub")

    def __bool__(self) -> bool:
        raise Refused(f"the rule tests {self.own__name}, for which there is no stub")

    # Types are written with brackets and bars, and decide nothing.

    def __getitem__(self, item: Any) -> Any:
        return Missing(f"{self.own__name}[...]")

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class Stub:
    """A namespace of stand-ins; an attribute it lacks is named when it is used."""

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.own__name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self.own__name}.{attribute}")


class Silent:
    """A logger: every method does nothing."""

    def __getattr__(self, attribute: str) -> Any:
        return lambda *args, **kwargs: None


class Files:
    """The request's texts as a file system, with a record of what was loaded from where."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.loaded: dict[str, Any] = {}

    def exists(self, path: str) -> bool:
        path = plain(path)
        return path in self.texts or any(t.startswith(path.rstrip("/") + "/") for t in self.texts)

    def listdir(self, path: str) -> list[str]:
        start = plain(path).rstrip("/") + "/"
        return sorted({t[len(start) :].split("/")[0] for t in self.texts if t.startswith(start)})

    def open(self, path: str, *args: Any, **kwargs: Any) -> "Handle":
        path = plain(path)
        if path not in self.texts:
            raise FileNotFoundError(path)
        return Handle(path, self.texts[path])

    def load(self, handle: "Handle", **kwargs: Any) -> Any:
        data = json.loads(handle.text, **kwargs)
        for key in data:
            if key not in NOT_COUNTS and not key.isdigit():
                raise Refused(f"{handle.path}: key {key!r} is no token count")
        self.loaded[handle.path] = data
        return data


class Handle:
    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def read(self) -> str:
        return self.text


ALLOWED_NODES = (
    ast.Module, ast.Expression, ast.FunctionDef, ast.arguments, ast.arg, ast.Lambda, ast.Return, ast.Assign, ast.AugAssign,
    ast.AnnAssign, ast.For, ast.While, ast.If, ast.With, ast.withitem, ast.Raise, ast.Try, ast.ExceptHandler, ast.Assert,
    ast.Import, ast.ImportFrom, ast.alias, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.NamedExpr, ast.BoolOp,
    ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.comprehension, ast.Compare, ast.Call, ast.keyword, ast.FormattedValue, ast.JoinedStr, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.expr_context, ast.boolop, ast.operator,
    ast.unaryop, ast.cmpop, ast.Match, ast.match_case, ast.MatchValue, ast.MatchSingleton, ast.MatchSequence,
    ast.MatchMapping, ast.MatchStar, ast.MatchAs, ast.MatchOr,
)  # fmt: skip
"""Syntax of which rules are made. Not among them: classes (but those that `Scope` makes), class patterns, which bind attributes that no
expression names, generators, coroutines, `global`, `nonlocal`, `del`."""


def check(tree: ast.AST, made: "ast.ClassDef | None" = None) -> None:
    """Refuse syntax that a rule has no need of, and names that lead to the interpreter, wherever a tree holds them.

    made: the class that `Scope` makes of a release's own, the only one that the tree may hold.
    """
    methods = {id(item) for item in made.body} if made is not None else set()
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', 0)}: "
        if not isinstance(node, ALLOWED_NODES) and node is not made:
            raise Refused(f"{where}{type(node).__name__} is not allowed in a rule")
        if isinstance(node, ast.Constant):
            check_text(node.value, where)
            continue
        for field, value in ast.iter_fields(node):
            if field == "name" and id(node) in methods and value in OPERATORS:
                continue
            # Every text of a node but a constant's is a name, or names with dots.
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    for name in text.split("."):
                        check_name(name, where)


def check_name(name: str, where: str = "") -> None:
    """Refuse a name that no rule needs: one with two underscores, of a frame, of code."""
    if ("__" in name and name not in ALLOWED_DUNDERS) or name in INNER:
        raise Refused(f"{where}{name} is not allowed in a rule")


def check_text(value: object, where: str) -> None:
    """Refuse a text that spells such a name."""
    if isinstance(value, str):
        spelt = [n for n in DUNDER.findall(value) if n in SPECIAL - ALLOWED_DUNDERS] if "__" in value else []
        if spelt or value in INNER:
            raise Refused(f"{where}the text {(spelt or [value])[0]!r} is not allowed in a rule")


def compiled(tree: "ast.Module | ast.Expression", path: str, made: "ast.ClassDef | None" = None) -> Any:
    """The only way from a tree to code: checked first, as a whole."""
    check(tree, made)
    return compile(ast.fix_missing_locations(tree), path, "eval" if isinstance(tree, ast.Expression) else "exec")


def plain(text: object) -> str:
    """A text as a str proper: a subclass may say that it equals anything. Refused where it is none."""
    if not isinstance(text, str):
        raise Refused(f"a {type(text).__name__} stands where a text is asked for")
    return str.__str__(text)


def without_annotations(node: ast.FunctionDef) -> ast.FunctionDef:
    """Annotations, docstrings, and decorators other than caches and method kinds, decide nothing and would need their own stubs."""
    for function in ast.walk(node):
        if isinstance(function, ast.FunctionDef):
            function.returns = None
            if ast.get_docstring(function, clean=False) is not None:
                function.body = function.body[1:] or [ast.Pass()]
        elif isinstance(function, ast.arg):
            function.annotation = None
    kept = ("staticmethod", "classmethod", "property", "functools.cached_property", "cached_property")
    node.decorator_list = [d for d in node.decorator_list if "cache" in ast.unparse(d) or ast.unparse(d) in kept]
    return node


class Member:
    """A token with a name, such as a dtype of torch: equal to itself alone."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value


class Scalar(Member):
    """A token of vLLM's own ScalarType, which the rules tell from torch's dtypes."""


class Local(dict):  # type: ignore[type-arg]
    """The body of a class while it is made: names that it lacks are the module's."""

    def __init__(self, scope: "Scope") -> None:
        super().__init__()
        self._scope = scope

    def __missing__(self, name: str) -> Any:
        return self._scope[name]


@functools.cache
def parsed(path: str, source: str) -> ast.Module:
    """A file is parsed once for all questions of a batch."""
    return ast.parse(source, path)


KEPT: dict[tuple[int, object], tuple[ast.AST, Any]] = {}
"""What was made of a node, by its id and what it is; the node is kept, so that its id stays its own."""


def once(node: ast.AST, what: object, make: Callable[[], Any]) -> Any:
    """What is made of a node, made once for all questions of a batch."""
    key = id(node), what
    if key not in KEPT:
        KEPT[key] = node, make()
    return KEPT[key][1]


class Scope(dict):  # type: ignore[type-arg]
    """The globals of one lifted module: a name is lifted, with what it needs, when it is first used."""

    def __init__(self, world: "World", path: str, source: str) -> None:
        super().__init__()
        self.world, self.path = world, path
        self.nodes: dict[str, ast.stmt] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.attributes: dict[str, list[ast.Assign]] = {}
        for node in parsed(path, source).body:
            self._index(node)
        self["__builtins__"] = {
            **SAFE,
            "__import__": self._import,
            "__build_class__": builtins.__build_class__,
            "super": super,
            "open": world.files.open,
        }
        self["__file__"], self["__name__"] = path, "rule"

    def _index(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.nodes[node.name] = node
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                self.nodes[target.id] = node
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                self.attributes.setdefault(target.value.id, []).append(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self.nodes[node.target.id] = ast.copy_location(ast.Assign([node.target], node.value), node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                self.nodes[alias.asname or alias.name.partition(".")[0]] = node

    def __missing__(self, name: str) -> Any:
        value = self._resolve(name)
        self[name] = value
        return value

    def _resolve(self, name: str) -> Any:
        if name in self.world.stubs:
            return self.world.stubs[name]
        node = self.nodes.get(name)
        if node is None:
            return self["__builtins__"].get(name, Missing(name))
        if isinstance(node, ast.FunctionDef):
            without_annotations(node)
            self._run(node, ast.Module([node], []))
            return dict.__getitem__(self, name)
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        if isinstance(node, ast.Assign):
            return self._value(node.value)
        return self._imported(node, name)

    def _run(self, node: ast.stmt, module: ast.Module, bases: int = 0) -> None:
        # A class has another text where another number of its bases could be evaluated.
        made = module.body[0] if isinstance(module.body[0], ast.ClassDef) else None
        exec(once(node, ("run", bases), lambda: compiled(module, self.path, made)), self)

    def _value(self, node: ast.expr, local: "Local | None" = None) -> Any:
        tree = ast.Expression(node)
        return eval(once(node, "value", lambda: compiled(tree, self.path)), self, self if local is None else local)

    def _imported(self, node: ast.stmt, name: str) -> Any:
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            return self.world.member(self._absolute(node.module or "", node.level), alias.name)
        assert isinstance(node, ast.Import)
        alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
        return self.world.module(alias.name if alias.asname else name)

    def _absolute(self, module: str, level: int) -> str:
        if not level:
            return module
        parts = self.path.removesuffix(".py").split("/")[:-level]
        return ".".join([*parts, *([module] if module else [])])

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = self._absolute(name, level)
        if fromlist:
            return Stub(module, **{n: self.world.member(module, n) for n in fromlist})
        return self.world.module(module.partition(".")[0])

    def _class(self, node: ast.ClassDef, members: "dict[str, Any] | None" = None) -> Any:
        """A class of the release as Python makes it, from what a rule may need of it.

        Its bases, field defaults, constants and method defaults are evaluated one by one: what can't be is `Missing`, which says
        so when it is used. Methods that a rule may not have are left out in the same way. Annotations decide nothing.
        """
        made = ClassBody(self, node.name, members or {})
        bases = []
        for base in node.bases:
            value = made.value(base.value if isinstance(base, ast.Subscript) else base, "a base")
            if value is typing.NamedTuple or (isinstance(value, type) and value is not object):
                bases.append(made.held(value))
        for item in node.body:
            made.add(item)
        body = ast.ClassDef(
            name=node.name, bases=[*bases], keywords=[], body=[*made.body, ast.Pass()], decorator_list=[]
        )
        outer = self.get(node.name, ABSENT)
        try:
            dict.update(self, made.values)
            self._run(node, ast.Module([ast.copy_location(body, node)], []), len(bases))
            cls = dict.__getitem__(self, node.name)
        finally:
            for name in made.values:
                dict.pop(self, name, None)
            dict.pop(self, node.name, None)
            if outer is not ABSENT:
                self[node.name] = outer
        for decorator in reversed(node.decorator_list):
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(called).rpartition(".")[2] in ("dataclass", "unique", "total_ordering"):
                cls = self._value(decorator)(cls)
        if members is None:
            self[node.name] = cls
            for assignment in self.attributes.get(node.name, ()):
                target = assignment.targets[0]
                assert isinstance(target, ast.Attribute)
                check_name(target.attr)
                setattr(cls, target.attr, self._value(assignment.value))
        return cls


ABSENT = object()


class ClassBody:
    """The statements of a class in a form that needs no other name: each value is evaluated before and held by a name of ours."""

    def __init__(self, scope: Scope, name: str, outer: dict[str, Any]) -> None:
        self._scope, self._name = scope, name
        self._members = Local(scope)
        self._members.update(outer)
        self.values: dict[str, Any] = {}
        self.body: list[ast.stmt] = []

    def held(self, value: Any) -> ast.Name:
        """A name by which the class statement finds a value; no source can spell it."""
        name = f"<{self._name} {len(self.values)}>"
        self.values[name] = value
        return ast.Name(name, ast.Load())

    def value(self, node: ast.expr, what: str) -> Any:
        """What an expression is; `Missing`, with the reason, where it can't be evaluated."""
        try:
            return self._scope._value(node, self._members)
        except Exception as error:
            return Missing(f"{self._name}.{what} ({error})")

    def add(self, item: ast.stmt) -> None:
        """One statement of the class; what is neither a method, a class nor a value decides nothing."""
        if isinstance(item, ast.FunctionDef):
            self._add_method(item)
        elif isinstance(item, ast.ClassDef):
            self._assign(item.name, self._scope._class(item, dict(self._members)))
        elif isinstance(item, ast.Assign) and all(isinstance(t, ast.Name) for t in item.targets):
            names = [t.id for t in item.targets if isinstance(t, ast.Name)]
            if not any(n.startswith("__") for n in names):
                value = self.value(item.value, names[0])
                for name in names:
                    self._assign(name, value)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            held = None
            if item.value is not None:
                value = self.value(item.value, item.target.id)
                self._members[item.target.id] = value
                held = self.held(value)
            kind = "ClassVar" if "ClassVar" in ast.unparse(item.annotation) else "field"
            if kind == "field":
                annotation = ast.Constant(kind)
                self.body.append(ast.AnnAssign(ast.Name(item.target.id, ast.Store()), annotation, held, 1))
            elif held is not None:
                self.body.append(ast.Assign([ast.Name(item.target.id, ast.Store())], held, lineno=item.lineno))

    def _assign(self, name: str, value: Any) -> None:
        self._members[name] = value
        self.body.append(ast.Assign([ast.Name(name, ast.Store())], self.held(value), lineno=1))

    def _add_method(self, item: ast.FunctionDef) -> None:
        if item.name.startswith("__") and item.name not in OPERATORS:
            return
        if any(isinstance(d, ast.Attribute) and d.attr in ("setter", "deleter") for d in item.decorator_list):
            return
        method = without_annotations(item)
        try:
            check(method)
        except Refused as reason:
            self._assign(item.name, Missing(f"{self._name}.{item.name} ({reason})"))
            return
        # The release's own nodes stay as they are: the next question makes the class from them again.
        arguments, decorators = copy.copy(method.args), method.decorator_list
        of = f"{item.name}'s"
        arguments.defaults = [self.held(self.value(d, f"{of} default")) for d in arguments.defaults]
        arguments.kw_defaults = [d and self.held(self.value(d, f"{of} default")) for d in arguments.kw_defaults]
        lifted = ast.FunctionDef(method.name, arguments, method.body, [], None)
        lifted.decorator_list = [self.held(self.value(d, f"{of} decorator")) for d in decorators]
        self.body.append(ast.copy_location(lifted, item))
        self._members[item.name] = Missing(f"{self._name}.{item.name}")


def check_fields(kind: type) -> None:
    """Refuse a class whose fields have other names than it gave them: dataclasses make code of these names."""
    for one in type.mro(kind):
        for key, field in one.__dict__.get("__dataclass_fields__", {}).items():
            if type(field.name) is not str or field.name != key or not key.isidentifier() or "__" in key:
                raise Refused("a field of a dataclass has another name than its own")


def plain_dataclass(kind: Any = None, /, **options: Any) -> Any:
    """dataclass, of fields whose names are those that were written."""
    if kind is None:
        return functools.partial(plain_dataclass, **options)
    check_fields(kind)
    return dataclasses.dataclass(**options)(kind)


def plain_asdict(value: Any, **options: Any) -> Any:
    """asdict, of such fields."""
    check_fields(type(value))
    return dataclasses.asdict(value, **options)


def plain_replace(value: Any, /, **changes: Any) -> Any:
    """replace, of such fields."""
    check_fields(type(value))
    return dataclasses.replace(value, **changes)


class PlainEnumType(enum.EnumMeta):
    """The type of a rule's enums: a call finds a member and makes no class, whose methods no check would see."""

    def __call__(cls, value: Any) -> Any:  # type: ignore[override]  # fewer parameters on purpose
        return super().__call__(value)

    def __setattr__(cls, name: str, value: Any) -> None:
        if cls in SEALED:
            raise Refused(f"{cls.__name__} of Python can't be changed by a rule")
        super().__setattr__(name, value)


SEALED: set[type] = set()
"""Classes that all questions of a source share."""


def plain_enum(base: Any) -> Any:
    """A base for a rule's enums, which behaves as Python's own."""
    made = PlainEnumType(base.__name__, (base,), PlainEnumType.__prepare__(base.__name__, (base,)))
    SEALED.add(made)
    return made


PYTHON: dict[str, dict[str, Any]] = {
    "enum": {n: plain_enum(getattr(enum, n)) for n in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")}
    | {"auto": enum.auto, "unique": enum.unique},
    "dataclasses": {
        "dataclass": plain_dataclass,
        "field": dataclasses.field,
        "fields": dataclasses.fields,
        "asdict": plain_asdict,
        "replace": plain_replace,
    },
    "functools": {
        n: getattr(functools, n) for n in ("lru_cache", "cache", "cached_property", "partial", "total_ordering")
    },
    "typing": {
        "NamedTuple": typing.NamedTuple,
        "Generic": object,
        "Protocol": object,
        "TYPE_CHECKING": False,
        "cast": lambda kind, value: value,
    },
    "abc": {"ABC": object, "abstractmethod": lambda f: f},
}
"""What Python's own modules give a class. Most are the real ones, as they only make what they are asked for."""
PYTHON["typing_extensions"] = PYTHON["typing"]


class World:
    """Modules of a release by their paths, lifted name by name as they are used; `stubs` stand before all of them."""

    def __init__(self, sources: dict[str, str], stubs: dict[str, Any], files: Files) -> None:
        self.sources, self.stubs, self.files = sources, stubs, files
        self._scopes: dict[str, Scope] = {}

    def scope(self, path: str) -> Scope:
        if path not in self._scopes:
            self._scopes[path] = Scope(self, path, self.sources[path])
        return self._scopes[path]

    def path(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in self.sources), None)

    def module(self, module: str) -> Any:
        if module in PYTHON:
            return Stub(module, **PYTHON[module])
        path = self.path(module)
        if path is not None:
            return Module(self.scope(path))
        last = module.rpartition(".")[2]
        return self.stubs.get(last, Missing(module))

    def member(self, module: str, name: str) -> Any:
        if module in PYTHON and name in PYTHON[module]:
            return PYTHON[module][name]
        if name in self.stubs:
            return self.stubs[name]
        path = self.path(module)
        if path is not None and name in self.scope(path).nodes:
            return self.scope(path)[name]
        if self.path(f"{module}.{name}") is not None:
            return self.module(f"{module}.{name}")
        return Missing(f"{module}.{name}")


class Module:
    """A lifted module as an object."""

    def __init__(self, scope: Scope) -> None:
        self.own__scope = scope

    def __getattr__(self, name: str) -> Any:
        return self.own__scope[name]


def plain_getattr(value: Any, name: str, *default: Any) -> Any:
    """getattr without private names."""
    name = plain(name)
    if name.startswith("_"):
        raise Refused(f"{name} is not allowed in a rule")
    check_name(name)
    return getattr(value, name, *default)


def plain_hasattr(value: Any, name: str) -> bool:
    """hasattr without private names; what has no stub is not there."""
    try:
        return not isinstance(plain_getattr(value, name, MISSING), Missing)
    except Refused:
        return False


def plain_type(value: Any) -> Any:
    """type(value), of data and of the rule's own classes alone."""
    found = type(value)
    if found.__module__ == "rule" or found in (int, float, bool, str, list, tuple, dict, set, type(None)):
        return found
    raise Refused(f"the type of a {found.__name__} is not allowed in a rule")


def plain_isinstance(value: Any, kinds: Any) -> bool:
    """isinstance, with the name of a type that has no stub."""
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if isinstance(kind, (Missing, Stub)):
            raise Refused(f"the rule asks whether a value is a {kind.own__name}, for which there is no stub")
    return isinstance(value, kinds)


MISSING = Missing("an attribute")
sys.modules["rule"] = types.ModuleType("rule")  # Where dataclasses look for the module of a class.
SAFE = {name: getattr(builtins, name) for name in SAFE_BUILTINS if hasattr(builtins, name)}
SAFE |= {
    "print": lambda *args, **kwargs: None,
    "getattr": plain_getattr,
    "hasattr": plain_hasattr,
    "isinstance": plain_isinstance,
    "type": plain_type,
}


def unnamed(request: dict[str, Any]) -> Any:
    """The device's name, or what stands for it."""
    name = request["device_name"]
    return Unnamed("a device of this compute capability") if name is None else name


def hardware(request: dict[str, Any], device_name: Any) -> tuple[Stub, Stub]:
    """(torch.cuda, vLLM's current_platform) of the device that is asked about."""

    def known_capability() -> tuple[int, ...]:
        if request["compute_capability"] is None:
            raise Refused(f"the rule asks for the compute capability of {device_name}, which the catalog does not know")
        return tuple(request["compute_capability"])

    def has_capability(wanted: Any, *rest: Any) -> bool:
        return (wanted if isinstance(wanted, tuple) else divmod(wanted, 10)) <= known_capability()

    def is_capability(wanted: Any, *rest: Any) -> bool:
        return (wanted if isinstance(wanted, tuple) else divmod(wanted, 10)) == known_capability()

    shared_memory = request["shared_memory_optin"]
    properties = Stub("properties", shared_memory_per_block_optin=shared_memory, name=device_name)
    cuda = Stub(
        "torch.cuda",
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda *a: properties,
        get_device_name=lambda *a: device_name,
        get_device_capability=lambda *a: known_capability(),
    )
    platform = Stub(
        "current_platform",
        get_device_name=lambda *a: device_name,
        is_rocm=lambda: False,
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_xpu=lambda: False,
        is_cpu=lambda: False,
        get_device_capability=lambda *a: Stub("capability", major=known_capability()[0], minor=known_capability()[1]),
        has_device_capability=has_capability,
        is_device_capability=is_capability,
        is_device_capability_family=lambda c, *a: known_capability()[0] == c // 10,
    )
    return cuda, platform


def namespace(request: dict[str, Any], files: Files) -> dict[str, Any]:
    """Stubs for what vLLM's and SGLang's rules call: platform, environment, logger, paths, JSON."""
    device_name = unnamed(request)
    cuda, platform = hardware(request, device_name)
    environment = request["environment"]

    class Environment:
        """vLLM's `envs`: a variable that is not set is None, as for those that matter here."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("VLLM_"):
                return environment.get(name)
            return Missing(f"envs.{name}")

    path = Stub(
        "os.path",
        join=lambda *p: os.path.normpath(os.path.join(*p)),
        dirname=os.path.dirname,
        realpath=os.path.normpath,
        abspath=os.path.normpath,
        basename=os.path.basename,
        exists=files.exists,
        isfile=files.exists,
        isdir=files.exists,
    )

    def variable(name: str, default: Any = None) -> Any:
        return environment.get(plain(name), default)

    environ = Stub("os.environ", get=variable)
    deterministic = Stub("deterministic", enable_deterministic_inference=False)
    server_args = Stub("server_args", enable_deterministic_inference=False)
    return {
        "get_config": lambda *a: None,
        "json": Stub("json", load=files.load, loads=json.loads),
        "os": Stub("os", path=path, environ=environ, getenv=variable, listdir=files.listdir),
        "math": Stub("math", ceil=math.ceil, floor=math.floor, log2=math.log2),
        "torch": Stub("torch", cuda=cuda, version=Stub("torch.version", hip=None)),
        "triton": Stub(
            "triton",
            __version__=request["triton_version"],
            cdiv=lambda a, b: -(-a // b),
            next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
        ),
        "envs": Environment(),
        "logger": Silent(),
        "current_platform": platform,
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 1 else 1,
        "get_device_name_as_file_name": lambda *a: device_name.replace(" ", "_"),
        "get_device_name": lambda *a: device_name,
        "vllm_is_batch_invariant": lambda: environment.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"),
        "get_sparse_q_block_size": lambda *a: None,
        "is_hip": lambda: False,
        "is_cuda": lambda: True,
        "get_global_server_args": lambda: server_args,
        "get_server_args": lambda: server_args,
        "get_exec": lambda: Stub("exec", deterministic=deterministic),
        "get_context": lambda: Stub("context", server_args=server_args),
        "get_bool_env_var": lambda name, default="false": environment.get(name, default) in ("1", "true", "True"),
    }


def evaluate(request: dict[str, Any]) -> list[list[Any]]:
    """[[how often, [tile, tuned file or None, key or None, other parameters]], ...] over the counts 1..max_count."""
    files = Files(request["texts"])
    world = World({request["file"]: request["source"]}, namespace(request, files), files)
    if request["entry"] not in world.scope(request["file"]).nodes:
        raise Refused(f"the source has no function {request['entry']}")
    rule = world.scope(request["file"])[request["entry"]]
    code = rule.__wrapped__.__code__ if hasattr(rule, "__wrapped__") else rule.__code__
    accepted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {}
    for name, value in request["arguments"].items():
        if name in accepted:
            arguments[name] = value
        elif value is not None:
            raise Refused(f"{request['entry']} has no parameter {name}")
    runs: list[list[Any]] = []
    for count in range(1, request["max_count"] + 1):
        config = rule(**arguments, **{request["counter"]: count})
        if isinstance(config, tuple):
            config = config[0]
        path = key = None
        for candidate, data in files.loaded.items():
            for k, value in data.items():
                if value is config and k not in NOT_COUNTS:
                    path, key = candidate, int(k)
        tile = 1
        for part in request["result"]:
            if isinstance(config, dict) and part not in config:
                raise Refused(f"the configuration at {request['counter']}={count} has no {part}")
            value = config[part] if isinstance(config, dict) else getattr(config, part)
            if type(value) is not int or not 0 < value <= LARGEST_PART:
                raise Refused(
                    f"the configuration at {request['counter']}={count} has {part} {value!r}, which is no tile"
                )
            tile *= value
        answer = [tile, path, key, others(config, request["result"])]
        if runs and runs[-1][1] == answer:
            runs[-1][0] += 1
        else:
            runs.append([1, answer])
    return runs


def others(config: Any, result: list[str]) -> str:
    """What else a configuration sets, as "BLOCK_SIZE_N=64 num_warps=4"; empty where it is no dictionary."""
    if not isinstance(config, dict):
        return ""
    kept = sorted((str(name), str(value).replace(" ", "")) for name, value in config.items() if name not in result)
    return " ".join(f"{name}={value}" for name, value in kept)[:LONGEST_PARAMETERS]


class Configuration(Stub):
    """A deployment's configuration in the default environment: what its class works out, it works out from the fields given here.

    A switch that is neither named nor worked out is off.
    """

    def __init__(self, name: str, lifted: Any = None, /, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        self.own__class = lifted if isinstance(lifted, type) else object

    def __getattr__(self, attribute: str) -> Any:
        worked_out = self.own__class.__dict__.get(attribute, MISSING)
        if isinstance(worked_out, property) and worked_out.fget is not None:
            return worked_out.fget(self)
        if isinstance(worked_out, (bool, int, float, str, type(None))):
            return worked_out  # The default of a field.
        if attribute.startswith(("use_", "is_", "enable_", "has_", "disable_", "require_")):
            return False
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        # No `Missing`: a rule that asks whether it is None would take it for a value.
        raise Refused(f"the rule reads {self.own__name}.{attribute}, which is not known here")


class Names(Stub):
    """A namespace of distinct tokens, one a name: torch's dtypes."""

    def __init__(self, name: str, kind: type[Member] = Member) -> None:
        super().__init__(name)
        self.own__kind = kind

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        token = self.own__kind(attribute, attribute)
        self.__dict__[attribute] = token
        return token


def defaults_of(source: str) -> dict[str, Any]:
    """Defaults of vLLM's environment variables: the literals of the annotated names in envs.py."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            try:
                found[node.target.id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def with_and_without_deep_gemm(
    choose: "Callable[[dict[str, Any], bool, list[bool]], str]", request: dict[str, Any]
) -> list[str]:
    """What a release chooses; twice where it asks whether DeepGEMM is there: with it and without it."""
    asked: list[bool] = []
    without = choose(request, False, asked)
    return [choose(request, True, asked), without] if asked else [without]


def vllm_environment(request: dict[str, Any], world_of: "Callable[[], World]") -> Any:
    """vLLM's `envs` in the default environment: a variable's value, else its default as the release declares it."""
    defaults = defaults_of(request["sources"].get(request["environment_file"], ""))

    class Environment:
        def __getattr__(self, name: str) -> Any:
            if name in request["environment"]:
                return request["environment"][name] not in ("", "0", "false", "False")
            if name in defaults:
                return defaults[name]
            getters = world_of().scope(request["environment_file"]).nodes.get("environment_variables")
            if isinstance(getters, ast.Assign) and isinstance(getters.value, ast.Dict):
                for key, getter in zip(getters.value.keys, getters.value.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        return world_of().scope(request["environment_file"])._value(getter)()
            raise Refused(f"the default of envs.{name} can't be read")

        def is_set(self, name: str) -> bool:
            return name in request["environment"]

    return Environment()


def vllm_stubs(
    request: dict[str, Any], files: Files, deep_gemm: bool, asked: list[bool], world_of: "Callable[[], World]"
) -> dict[str, Any]:
    """Stubs for what vLLM's selection functions call. asked: gets an entry when DeepGEMM is asked for."""
    stubs = namespace(request, files)
    torch = stubs["torch"]
    dtypes = Names("torch")
    dtypes.__dict__.update(cuda=torch.cuda, version=torch.version, dtype=object)
    platform = stubs["current_platform"]
    platform.__dict__.update(
        is_tpu=lambda: False,
        is_out_of_tree=lambda: False,
        is_neuron=lambda: False,
        device_name=platform.get_device_name(),
        fp8_dtype=lambda: dtypes.float8_e4m3fn,
        supports_fp8=lambda: known_capability() >= (8, 9),
        is_fp8_fnuz=lambda: False,
    )
    off = lambda *a, **k: False  # noqa: E731

    def has_deep_gemm() -> bool:
        asked.append(deep_gemm)
        return deep_gemm

    def known_capability() -> tuple[int, int]:
        capability: tuple[int, int] = platform.get_device_capability().major, platform.get_device_capability().minor
        return capability

    stubs.update(
        envs=vllm_environment(request, world_of),
        torch=dtypes,
        rocm_aiter_ops=Stub("rocm_aiter_ops", is_fused_moe_enabled=off, is_enabled=off, is_rdna_aiter_enabled=off),
        has_deep_gemm=has_deep_gemm,
        is_deep_gemm_supported=lambda: has_deep_gemm() and known_capability()[0] >= 9,
        prioritize_humming=lambda backends: backends,
        has_humming=off,
        scalar_types=Names("scalar_types", Scalar),
        ScalarType=Scalar,
        # No model's own exceptions: a plain deployment.
        get_current_vllm_config=lambda: Stub("vllm_config", model_config=None),
        has_triton_kernels=off,
    )
    for name in request["flashinfer_names"]:
        stubs[name] = lambda *a, **k: request["flashinfer"]
    return stubs


VLLM_LAYERS = "vllm.model_executor.layers"


def named(world: World, module: str, name: str) -> Any:
    """A name of a release's module. Raises Refused where the release has none."""
    value = world.member(module, name)
    if isinstance(value, Missing):
        raise Refused(f"the release has no {module}.{name}")
    return value


def vllm_quantization(request: dict[str, Any], world: World, parameters: tuple[str, ...]) -> dict[str, Any]:
    """The number formats of weights and activations, where the selection function takes them."""
    if "weight_key" not in parameters or request["dtype"] in ("bf16", "fp16"):
        return {"weight_key": None, "activation_key": None}
    is_block = request["dtype"] == "fp8-block"
    names = ("kFp8Static128BlockSym", "kFp8Dynamic128Sym") if is_block else ("kFp8StaticTensorSym",) * 2
    weight, activation = (named(world, f"{VLLM_LAYERS}.quantization.utils.quant_utils", n) for n in names)
    return {"weight_key": weight, "activation_key": activation}


def vllm_activation(request: dict[str, Any], world: World) -> Any:
    """The experts' activation, as the release names it."""
    asks = request["model"]
    activation: Any = asks["activation"] if asks["gated"] else f"{asks['activation']}_no_mul"
    if world.path(f"{VLLM_LAYERS}.fused_moe.activation") is None:
        return activation
    kinds = named(world, f"{VLLM_LAYERS}.fused_moe.activation", "MoEActivation")
    if activation not in [k.value for k in kinds]:
        raise Refused(f"the release has no activation {activation!r} of experts")
    return kinds(activation)


def vllm_configurations(request: dict[str, Any], world: World) -> tuple[Configuration, Configuration]:
    """(experts', parallel) configuration of a plain deployment."""
    asks, ranks, dtypes = request["model"], request["expert_parallel"], world.stubs["torch"]
    configurations = f"{VLLM_LAYERS}.fused_moe.config"
    routing: Any = None
    if (
        world.path(configurations) is not None
        and "RoutingMethodType" in world.scope(configurations.replace(".", "/") + ".py").nodes
    ):
        routing = named(world, configurations, "RoutingMethodType").Renormalize
    parallel = Configuration(
        "parallel",
        world.member(configurations, "FusedMoEParallelConfig"),
        tp_size=1,
        ep_size=ranks,
        use_ep=ranks > 1,
        dp_size=1,
        pcp_size=1,
        sp_size=1,
        all2all_backend="",
    )
    config = Configuration(
        "config",
        world.member(configurations, "FusedMoEConfig"),
        moe_parallel_config=parallel,
        is_act_and_mul=asks["gated"],
        has_bias=asks["bias"],
        activation=vllm_activation(request, world),
        routing_method=routing,
        router_logits_dtype=dtypes.bfloat16,
        in_dtype=dtypes.float16 if request["dtype"] == "fp16" else dtypes.bfloat16,
        moe_backend="auto",
        hidden_dim=asks["hidden"],
        hidden_dim_unpadded=asks["hidden"],
        intermediate_size=asks["width"],
        intermediate_size_per_partition=asks["width"],
        intermediate_size_per_partition_unpadded=asks["width"],
        num_experts=asks["experts"],
        num_local_experts=asks["experts"] // ranks,
        experts_per_token=asks["top_k"],
        max_num_tokens=8192,
        num_logical_experts=asks["experts"],
        swiglu_limit=None,
        tp_size=1,
        ep_size=ranks,
        dp_size=1,
    )
    return config, parallel


def vllm_backend(request: dict[str, Any], deep_gemm: bool, asked: list[bool]) -> str:
    """The backend that a release's own selection function returns for a plain deployment, by its member's name.

    asked: gets an entry when the release asks for DeepGEMM.
    """
    files = Files({})
    stubs = vllm_stubs(request, files, deep_gemm, asked, lambda: world)
    world = World(request["sources"], stubs, files)
    del stubs["get_config"]
    module, entry = request["entry"]
    function = named(world, module, entry)
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount]
    keys = vllm_quantization(request, world, parameters)
    config, parallel = vllm_configurations(request, world)
    ranks = request["expert_parallel"]
    known = keys | {
        "moe_config": config,
        "config": config,
        "moe_parallel_config": parallel,
        "use_ep": ranks > 1,
        "use_dp": False,
        "block_quant": request["dtype"] == "fp8-block",
        "with_lora_support": False,
        "tp_size": 1,
    }
    required = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
    absent = [n for n in required if n not in known]
    if absent:
        raise Refused(f"{entry} has parameters that are not known here: {', '.join(absent)}")
    optional = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) : code.co_argcount]
    chosen = function(**{n: known[n] for n in required}, **{n: known[n] for n in optional if n in known})
    if isinstance(chosen, tuple):
        chosen = chosen[0]
    if not isinstance(chosen, enum.Enum):
        raise Refused(f"{entry} returned no backend")
    return chosen.name


class Slice:
    """What of a function decides one of its results: the statements that assign it, what they read, and the branches around them.

    The rest, such as logging, checks that refuse a deployment, and other settings, is left out: it has no say in the result.
    """

    def __init__(self, function: ast.FunctionDef, attributes: set[str], keys: set[str]) -> None:
        self._attributes, self._keys = set(attributes), set(keys)
        self._names: set[str] = set()
        for node in ast.walk(function):  # What a function returns in a name is filled by key.
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                self._names.add(node.value.id)
        self._filled = set(self._names)
        size = -1
        while size != len(self._attributes) + len(self._names):
            size = len(self._attributes) + len(self._names)
            self.body = self._kept(function.body)

    def _read(self, node: ast.AST) -> None:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                self._names.add(part.id)
            elif isinstance(part, ast.Attribute):
                self._attributes.add(part.attr)

    def _is_wanted(self, target: ast.expr) -> bool:
        if isinstance(target, ast.Name):
            return target.id in self._names
        if isinstance(target, ast.Attribute):
            return target.attr in self._attributes
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            is_key = isinstance(target.slice, ast.Constant)
            return target.value.id in self._names and (
                target.value.id not in self._filled or not is_key or target.slice.value in self._keys  # type: ignore[attr-defined]
            )
        if isinstance(target, ast.Tuple):
            return any(self._is_wanted(t) for t in target.elts)
        return False

    def _kept(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [kept for statement in body if (kept := self._one(statement)) is not None]

    def _one(self, node: ast.stmt) -> ast.stmt | None:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is None or not any(self._is_wanted(t) for t in targets):
                return None
            self._read(node.value)
            return node
        if isinstance(node, ast.Return):
            if node.value is not None and not isinstance(node.value, ast.Dict):
                self._read(node.value)
            elif isinstance(node.value, ast.Dict):
                pairs = [
                    (k, v)
                    for k, v in zip(node.value.keys, node.value.values, strict=True)
                    if not isinstance(k, ast.Constant) or k.value in self._keys
                ]
                for _, value in pairs:
                    self._read(value)
                return ast.copy_location(ast.Return(ast.Dict([k for k, _ in pairs], [v for _, v in pairs])), node)
            return node
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
            names = [node.name] if isinstance(node, ast.FunctionDef) else [a.asname or a.name for a in node.names]
            return node if any(n in self._names for n in names) else None
        if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            return self._block(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            # `overrides.update(...)` fills what is returned.
            called = node.value.func
            filled = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)
            if filled and called.value.id in self._filled and called.attr in ("update", "setdefault"):  # type: ignore[attr-defined]
                self._read(node.value)
                return node
        return None

    def _block(self, node: Any) -> ast.stmt | None:
        made = copy.copy(node)
        made.body = self._kept(node.body)
        made.orelse = self._kept(getattr(node, "orelse", []))
        if isinstance(node, ast.Try):
            made.finalbody, made.handlers = self._kept(node.finalbody), [copy.copy(h) for h in node.handlers]
            for handler in made.handlers:
                handler.body = self._kept(handler.body) or [ast.Pass()]
        if not made.body and not made.orelse:
            return None
        made.body = made.body or [ast.Pass()]
        for part in ("test", "iter"):
            if hasattr(node, part):
                self._read(getattr(node, part))
        for item in getattr(node, "items", []):
            self._read(item.context_expr)
        return made  # type: ignore[no-any-return]  # a copy of a statement


RUNNER = "moe_runner_backend"


class Arguments(Stub):
    """SGLang's server arguments as they are when nobody sets any: what is not given here has its field's own default."""

    def __init__(self, scope: Scope | None, fields: dict[str, ast.expr], /, **given: Any) -> None:
        super().__init__("server_args", **given)
        self.own__scope, self.own__fields = scope, fields

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute in self.own__fields and self.own__scope is not None:
            default = self.own__fields[attribute]
            try:
                return ast.literal_eval(default)
            except ValueError:
                raise Refused(f"the default of server_args.{attribute} can't be read") from None
        if attribute.startswith(("use_", "is_", "enable_", "has_", "disable_", "require_", "_quantization_explicitly")):
            return False
        raise Refused(f"the rule reads server_args.{attribute}, which is not known here")


SGLANG_OTHERS = (
    "hip",
    "npu",
    "xpu",
    "hpu",
    "cpu",
    "musa",
    "mps",
    "out_of_tree",
    "gfx95_supported",
    "gfx1250_supported",
)
"""Hardware that SGLang asks for by is_...(), and that is not NVIDIA's."""


def sglang_deep_gemm(capability: "Callable[[], tuple[int, int]]", deep_gemm: bool, asked: list[bool]) -> Any:
    """SGLang's deep_gemm_wrapper. asked: gets an entry when it is asked for."""

    def has_deep_gemm() -> bool:
        asked.append(deep_gemm)
        return deep_gemm and capability()[0] >= 9

    class DeepGemm:
        """sglang.srt.layers.deep_gemm_wrapper: there on GPUs from compute capability 9.0 on, where its package is."""

        def __getattr__(self, name: str) -> Any:
            if name == "ENABLE_JIT_DEEPGEMM":
                return has_deep_gemm()
            return Missing(f"deep_gemm_wrapper.{name}")

    return DeepGemm()


def sglang_platform(capability: "Callable[[], tuple[int, int]]") -> Any:
    """SGLang's get_platform."""

    class Platform:
        """sglang.srt.runtime_context.get_platform(): which hardware, as properties."""

        def __getattr__(self, name: str) -> Any:
            if name in ("is_cuda", "is_nvidia"):
                return True
            if name.startswith("is_sm"):
                digits = name.removeprefix("is_sm").partition("_")[0]
                if digits.isdigit():
                    return capability()[0] == int(digits) // 10
            if name in ("is_blackwell", "is_blackwell_supported"):
                return capability()[0] in (10, 12)
            if name.startswith("is_") and name.removeprefix("is_") in (*SGLANG_OTHERS, "gfx95", "gfx1250"):
                return False
            return Missing(f"get_platform().{name}")

    return Platform


def sglang_variables(request: dict[str, Any]) -> Any:
    """SGLang's `envs` in the default environment."""
    environ_file = request["sources"].get("sglang/srt/environ.py", "")
    variables = {
        item.targets[0].id: item.value
        for declared in parsed("sglang/srt/environ.py", environ_file).body
        if isinstance(declared, ast.ClassDef)
        for item in declared.body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    }

    class Variable:
        """An environment variable of SGLang's `envs`: its value, else the literal default of its declaration."""

        def __init__(self, name: str) -> None:
            self.own__name = name

        def is_set(self) -> bool:
            return self.own__name in request["environment"]

        def get(self) -> Any:
            if self.own__name in request["environment"]:
                return request["environment"][self.own__name] in ("1", "true", "True")
            declared = variables.get(self.own__name)
            if not isinstance(declared, ast.Call) or not declared.args:
                raise Refused(f"the default of {self.own__name} can't be read")
            try:
                return ast.literal_eval(declared.args[0])
            except ValueError:
                raise Refused(f"the default of {self.own__name} can't be read") from None

    class Variables:
        def __getattr__(self, name: str) -> Any:
            return Variable(name)

    return Variables()


def sglang_configurations(request: dict[str, Any]) -> tuple[Configuration, Configuration]:
    """(model_config, hf_config) of a model with these experts and nothing set by hand."""
    quantization_config: dict[str, Any] | None = None
    if request["dtype"].startswith("fp8"):
        quantization_config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        if request["dtype"] == "fp8-block":
            quantization_config["weight_block_size"] = [128, 128]
    family = request["architecture"]
    hf_config = Configuration(
        "hf_config",
        architectures=[family],
        quantization_config=quantization_config,
        num_experts=request["model"]["experts"],
        hidden_act=request["model"]["activation"],
        mlp_hidden_act=request["model"]["activation"],
        model_type="",
    )
    model_config = Configuration(
        "model_config", hf_config=hf_config, hf_text_config=hf_config, quantization=None, nvfp4_moe_meta=None
    )
    return model_config, hf_config


def sglang_stubs(
    request: dict[str, Any], files: Files, deep_gemm: bool, asked: list[bool], model_config: Configuration
) -> dict[str, Any]:
    """Stubs for what SGLang's choice calls. asked: gets an entry when DeepGEMM is asked for."""
    stubs = namespace(request, files)
    platform, cuda = stubs["current_platform"], stubs["torch"].cuda

    def capability() -> tuple[int, int]:
        device = platform.get_device_capability()
        return device.major, device.minor

    def major(*wanted: int) -> Any:
        return lambda *a, **k: capability()[0] in wanted

    def driver_version(*a: Any) -> Any:
        raise Refused("the choice asks for the version of the NVIDIA driver, which no release tells")

    off = lambda *a, **k: False  # noqa: E731
    sm = lambda *a, **k: capability()[0] * 10 + capability()[1]  # noqa: E731
    dtypes = Names("torch")
    dtypes.__dict__.update(cuda=cuda, version=Stub("torch.version", hip=None, cuda="12.8"), dtype=object)
    stubs.update(
        {f"is_{kind}": off for kind in SGLANG_OTHERS},
        torch=dtypes,
        envs=sglang_variables(request),
        get_nvidia_driver_version=driver_version,
        get_nvidia_driver_version_str=driver_version,
        deep_gemm_wrapper=sglang_deep_gemm(capability, deep_gemm, asked),
        get_platform=sglang_platform(capability),
        is_cuda=lambda *a: True,
        is_sm90_supported=major(9),
        is_sm100_supported=major(10),
        is_sm120_supported=major(12),
        is_blackwell_supported=major(10, 12),
        is_blackwell=major(10, 12),
        is_flashinfer_available=lambda *a: True,
        is_triton_kernels_available=lambda *a: True,
        get_device_sm=sm,
        get_device_capability=lambda *a: capability(),
        check_pkg_version_at_least=lambda *a: True,
        parse_connector_type=lambda *a: None,
        ConnectorType=Names("ConnectorType"),
        is_deepseek_nsa=off,
        is_deepseek_dsa=off,
        is_deepseek_v4=off,
        resolving_view=lambda server: server,
        resolved_view=lambda server: server,
        model_config_of=lambda server: model_config,
        get_int_env_var=lambda name, default=0: default,
    )
    return stubs


def sglang_server(
    request: dict[str, Any], world: World, server_path: str, model_config: Configuration, hf_config: Configuration
) -> tuple[Arguments, ast.ClassDef]:
    """The server arguments of one node with nothing set by hand, and their class."""
    server_class = world.scope(server_path).classes.get("ServerArgs")
    if server_class is None:
        raise Refused("the release has no class ServerArgs")
    if RUNNER not in "".join(request["sources"].values()):
        raise Refused(f"the release has no server argument {RUNNER}")
    # Newer releases declare the fields in classes by topic.
    topics = [c for p in sorted(world.sources) if "/arg_groups/fields/" in p for c in world.scope(p).classes.values()]
    fields = {
        item.target.id: item.value
        for declared in [*topics, server_class]
        for item in declared.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None
    }
    ranks = request["expert_parallel"]
    server = Arguments(
        world.scope(server_path),
        fields,
        moe_runner_backend="auto",
        moe_a2a_backend="none",
        quantization=None,
        speculative_algorithm=None,
        tp_size=ranks,
        ep_size=ranks,
        dp_size=1,
        nnodes=1,
        device="cuda",
        dtype="auto",
        get_model_config=lambda: model_config,
        get_hf_config=lambda: hf_config,
        model_path="",
    )
    return server, server_class


def sglang_runner(request: dict[str, Any], deep_gemm: bool, asked: list[bool]) -> str:
    """The runner that SGLang's server arguments and quantisation method give for `--moe-runner-backend auto`.

    asked: gets an entry when the release asks for DeepGEMM.
    """
    files = Files({})
    model_config, hf_config = sglang_configurations(request)
    world = World(request["sources"], sglang_stubs(request, files, deep_gemm, asked, model_config), files)
    server_path = world.path("sglang.srt.server_args")
    if server_path is None:
        raise Refused("the release has no sglang.srt.server_args")
    server, server_class = sglang_server(request, world, server_path, model_config, hf_config)
    for path, node, is_method in declarations(world, server_path, server_class, request["architecture"]):
        scope = world.scope(path)
        outer = scope.get(node.name, ABSENT)
        exec(once(node, "runner", partial(runner_part, node)), scope)
        function = scope.pop(node.name)
        if outer is not ABSENT:
            scope[node.name] = outer
        changed = function(*[server, hf_config][: len(node.args.args)])
        if not is_method and isinstance(changed, dict):
            server.__dict__.update({k: v for k, v in changed.items() if k in (RUNNER, "quantization")})
    runner = server.moe_runner_backend
    if isinstance(runner, Missing) or not isinstance(runner, str):
        raise Refused(f"{RUNNER} can't be told")
    return resolved_runner(world, request, runner)


def runner_part(node: ast.FunctionDef) -> Any:
    """The code of what a function says of the runner."""
    part = Slice(node, {RUNNER}, {RUNNER, "quantization"})
    arguments = copy.copy(node.args)
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    made = ast.copy_location(ast.FunctionDef(node.name, arguments, part.body or [ast.Pass()], [], None), node)
    return compiled(ast.Module([without_annotations(made)], []), f"<part of {node.name}>")


def sets_runner(node: ast.AST) -> bool:
    """Whether a function assigns the runner, or returns one."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Assign, ast.AugAssign)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            for t in targets:
                if isinstance(t, ast.Attribute) and t.attr == RUNNER:
                    return True
                if isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant) and t.slice.value == RUNNER:
                    return True
        returned = part.value if isinstance(part, ast.Return) else None
        keys = returned.keys if isinstance(returned, ast.Dict) else []
        if any(isinstance(k, ast.Constant) and k.value == RUNNER for k in keys):
            return True
    return False


def declarations(
    world: World, server_path: str, server_class: ast.ClassDef, family: str
) -> list[tuple[str, ast.FunctionDef, bool]]:
    """(file, function, whether it is a method of the server arguments) of all that set the runner for a model's class, in their order.

    Up to SGLang 0.5.14 methods of ServerArgs; from 0.5.15 functions that are registered for the model's class, and passes after them.
    """

    methods = {f.name: f for f in server_class.body if isinstance(f, ast.FunctionDef)}
    start = methods.get("__post_init__")
    called = [
        n.func.attr
        for n in (ast.walk(start) if start is not None else ())
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in methods
    ]
    order = [*(["__post_init__"] if start is not None else []), *called, *methods]
    skipped = ("add_cli_args", "from_cli_args", "_handle_a2a_moe", "_handle_deprecated_args")
    found = [
        (server_path, methods[n], True)
        for n in dict.fromkeys(order)
        if n not in skipped and once(methods[n], "sets", partial(sets_runner, methods[n]))
    ]
    registered, passes = [], []
    for path in sorted(world.sources):
        if "/arg_groups/" not in path:
            continue
        for node in world.scope(path).nodes.values():
            if not isinstance(node, ast.FunctionDef) or not once(node, "sets", partial(sets_runner, node)):
                continue
            for decorator in node.decorator_list:
                text = ast.unparse(decorator)
                if text.startswith("_register_for(") and isinstance(decorator, ast.Call):
                    names = [a.value for a in decorator.args if isinstance(a, ast.Constant)]
                    if family in names:
                        registered.append((path, node, False))
                elif text.endswith("register_post_process"):
                    passes.append((path, node, False))
    return found + registered + passes


def resolved_runner(world: World, request: dict[str, Any], runner: str) -> str:
    """The runner that runs where the server arguments leave `auto`: what the quantisation method makes of it."""
    kinds = world.member("sglang.srt.layers.moe.utils", "MoeRunnerBackend")
    if isinstance(kinds, Missing):
        raise Refused("the release has no MoeRunnerBackend")
    if runner != "auto":
        return str(kinds(runner).value)
    is_fp8 = request["dtype"].startswith("fp8")
    module, name = (
        ("sglang.srt.layers.quantization.fp8", "Fp8MoEMethod")
        if is_fp8
        else ("sglang.srt.layers.quantization.unquant", "UnquantizedFusedMoEMethod")
    )
    a2a = world.member("sglang.srt.layers.moe.utils", "MoeA2ABackend")
    made: list[Any] = []

    def make_runner(backend: Any, *rest: Any, **kwargs: Any) -> Any:
        made.append(backend)
        return Stub("runner", runner_backend=backend)

    none = [k for k in ([] if isinstance(a2a, Missing) else a2a) if k.value in ("none", None)]
    world.stubs.update(
        MoeRunner=make_runner,
        MoeRunnerBackend=kinds,
        get_moe_runner_backend=lambda: kinds.AUTO,
        get_moe_a2a_backend=lambda: none[0] if none else Missing("get_moe_a2a_backend()"),
    )
    method = world.member(module, name)
    if isinstance(method, Missing) or not hasattr(method, "create_moe_runner"):
        raise Refused(f"{name} of the release has no create_moe_runner: it chooses in its forward")
    this = Method(
        method,
        block_quant=request["dtype"] == "fp8-block",
        quant_config=Configuration("quant_config", weight_block_size=[128, 128]),
    )
    method.create_moe_runner(this, Configuration("layer"), Configuration("moe_runner_config"))
    if not made:
        raise Refused(f"{name}.create_moe_runner made no runner")
    return str(made[0].value)


class Method(Configuration):
    """A quantisation method before its weights are there: what it is asked is a method of its class, or off."""

    def __init__(self, lifted: Any, /, **attributes: Any) -> None:
        super().__init__("method", lifted, **attributes)

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self.own__class, attribute, None) if attribute.startswith("is_") else None
        if callable(found):
            raw = next((c.__dict__[attribute] for c in type.mro(self.own__class) if attribute in c.__dict__), None)
            return found if isinstance(raw, staticmethod) else functools.partial(found, self)
        return super().__getattr__(attribute)


def choose_attention_backend(request: dict[str, Any]) -> str:
    """What FlashInfer's own choice gives for the prefill wrappers' backend='auto', without a custom mask."""
    files = Files({})
    stubs = namespace(request, files)
    major, minor = request["compute_capability"]
    dtypes = Names("torch")
    # Releases with FA3 kernels are built for CUDA 12.3 or newer, and torch has come with 12.8 since 2.7.
    dtypes.__dict__.update(cuda=stubs["torch"].cuda, version=Stub("torch.version", cuda="12.8", hip=None))
    stubs.update(
        torch=dtypes,
        get_compute_capability=lambda *a: (major, minor),
        version_at_least=lambda a, b: [int(x) for x in a.split(".")] >= [int(x) for x in b.split(".")],
    )
    scope = World({request["file"]: request["source"]}, stubs, files).scope(request["file"])
    entry = request["attention_backend"]
    if entry not in scope.nodes:
        raise Refused(f"the source has no function {entry}")
    rule = scope[entry]
    code = getattr(rule, "__wrapped__", rule).__code__
    dtype = getattr(dtypes, request["dtype"])
    head_dims = dict(zip(("head_dim_qk", "head_dim_vo"), request["head_dims"], strict=True))
    accepted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    device = Stub("device", type="cuda", index=0)
    no_encoding = scope["PosEncodingMode"].NONE.value
    chosen = rule(
        device, no_encoding, False, False, dtype, dtype, **{n: d for n, d in head_dims.items() if n in accepted}
    )
    if not isinstance(chosen, str):
        raise Refused(f"{entry} returned {chosen!r}, not the name of a backend")
    return chosen


LONGEST_REASON = 2000
"""Characters of what a rule's exception says."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question: its runs or its kernel, or why it is unknown."""
    try:
        if "framework" in request:
            choose = {"vllm": vllm_backend, "sglang": sglang_runner}[request["framework"]]
            return {"kernels": with_and_without_deep_gemm(choose, request)}
        if "attention_backend" in request:
            return {"kernel": choose_attention_backend(request)}
        return {"runs": evaluate(request)}
    except NameAsked:
        return {"asks_name": True}
    except RecursionError:
        return {"unknown": "the rule recurses without end"}
    except MemoryError:
        return {"unknown": "the rule takes more memory than it may"}
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"[:LONGEST_REASON]}


def confinement() -> Any:
    """confinement.py from beside this file: -I and -S leave no path to import it by."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "confinement.py")
    spec = importlib.util.spec_from_file_location("confinement", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["confinement"] = module
    spec.loader.exec_module(module)
    return module


MAKERS = (ast, collections, dataclasses, enum, functools, inspect, typing)
"""Modules whose functions make code and look at frames for a rule."""


def main() -> None:
    """Read the request, put up the walls and say which stand, then answer a question a line.

    Who asks sees how far it went where a rule ends the process.
    """
    import resource

    given = json.loads(sys.stdin.read())
    sys.stdin.close()
    os.close(0)
    walls_of = confinement()
    makers = [value for module in MAKERS for value in vars(module).values()]
    walls = walls_of.confine(walls_of.codes_of([*makers, *globals().values()]), main.__code__)
    print(json.dumps({"walls": walls}), flush=True)
    missing = [f"{name}: {walls[name]}" for name in walls_of.REQUIRED if walls[name]]
    for number, question in enumerate(given["questions"]):
        # Each question has its own time.
        until = math.ceil(time.process_time()) + given["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        if missing and question["origin"] not in given["trusted"]:
            said = {"refused": "; ".join(missing)}
        else:
            said = answer(given["shared"] | question)
        print(json.dumps({"number": number, **said}), flush=True)
    # No finalizer of a rule runs.
    os._exit(0)


if __name__ == "__main__":
    main()
