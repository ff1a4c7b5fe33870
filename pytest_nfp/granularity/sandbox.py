"""Runs inside a separate, isolated interpreter: lifts a framework's rule from its source and evaluates it.

Started as `python -I -S sandbox.py`, with a JSON request on standard input and a JSON answer on standard output. It
imports the standard library alone. The rule runs with whitelisted builtins and stubs for what it may call; its only
files are the texts of the request; time and memory are limited. Source that reaches for anything else is refused.
"""

import ast
import builtins
import functools
import json
import math
import os
import sys
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
    "iter",
    "len",
    "list",
    "map",
    "max",
    "min",
    "next",
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
    "repr",
]
ALLOWED_DUNDERS = {"__file__", "__version__"}
CPU_SECONDS = 50
MEMORY_BYTES = 1 << 30


CACHED = type(functools.lru_cache(len))


class Refused(Exception):
    """The source asks for something that a granularity rule has no need of."""


class Missing:
    """Stands for a name that has no stub: any use of it says which name was missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise Refused(f"the rule uses {self._name}.{attribute}, for which there is no stub")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(f"the rule calls {self._name}, for which there is no stub")

    def __bool__(self) -> bool:
        raise Refused(f"the rule tests {self._name}, for which there is no stub")


class Stub:
    """A namespace of stand-ins; an attribute it lacks is named when it is used."""

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return Missing(f"{self._name}.{attribute}")


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
        return path in self.texts or any(t.startswith(path.rstrip("/") + "/") for t in self.texts)

    def listdir(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        return sorted({t[len(start) :].split("/")[0] for t in self.texts if t.startswith(start)})

    def open(self, path: str, *args: Any, **kwargs: Any) -> "Handle":
        if path not in self.texts:
            raise FileNotFoundError(path)
        return Handle(path, self.texts[path])

    def load(self, handle: "Handle", **kwargs: Any) -> Any:
        data = json.loads(handle.text, **kwargs)
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


def check(tree: ast.AST) -> None:
    """Refuse private attributes and names, and statements that a rule has no need of."""
    node: Any
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        if name and name.startswith("__") and name not in ALLOWED_DUNDERS:
            raise Refused(f"line {node.lineno}: {name} is not allowed in a rule")
        if isinstance(node, ast.Attribute) and node.attr in ("format_map", "mro", "gi_frame", "cr_frame", "f_globals"):
            raise Refused(f"line {node.lineno}: {node.attr} is not allowed in a rule")
        if isinstance(node, (ast.ClassDef, ast.AsyncFunctionDef, ast.Await, ast.Global, ast.Nonlocal, ast.Delete)):
            raise Refused(f"line {node.lineno}: {type(node).__name__} is not allowed in a rule")


def record_fields(node: ast.ClassDef) -> dict[str, Any] | None:
    """Fields and literal defaults of a class that holds nothing else: a dataclass or named tuple, as rules return."""
    fields: dict[str, Any] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            try:
                fields[item.target.id] = ... if item.value is None else ast.literal_eval(item.value)
            except ValueError:
                return None
        elif not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)):
            return None
    return fields


def record(name: str, fields: dict[str, Any]) -> Any:
    """A constructor for such a class."""

    def make(*args: Any, **kwargs: Any) -> Stub:
        values = {f: v for f, v in fields.items() if v is not ...} | dict(zip(fields, args, strict=False)) | kwargs
        return Stub(name, **values)

    return make


def lift(source: str, entry: str, names: dict[str, Any]) -> Any:
    """The entry function and every global it reaches, compiled alone in the namespace `names`."""
    module = ast.parse(source)
    available: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            available[node.name] = node
        elif isinstance(node, ast.ClassDef) and (fields := record_fields(node)) is not None:
            names.setdefault(node.name, record(node.name, fields))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            available[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            available[node.target.id] = ast.copy_location(ast.Assign([node.target], node.value), node)
    if entry not in available:
        raise Refused(f"the source has no function {entry}")
    wanted: set[str] = set()
    queue = [entry]
    while queue:
        name = queue.pop()
        if name in wanted or name in names or name not in available:
            continue
        wanted.add(name)
        node = available[name]
        if isinstance(node, ast.FunctionDef):
            # Annotations and decorators other than caches decide nothing here and would need their own stubs.
            node.returns = None
            for a in [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]:
                if a is not None:
                    a.annotation = None
            node.decorator_list = [d for d in node.decorator_list if "cache" in ast.unparse(d)]
        check(node)
        queue += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    body = [available[n] for n in available if n in wanted]
    lifted = ast.fix_missing_locations(ast.Module(body, []))
    for used in ast.walk(lifted):
        if isinstance(used, ast.Name) and used.id not in names and used.id not in available:
            names.setdefault(used.id, SAFE.get(used.id, Missing(used.id)))
    # Functions first: an assignment may call one, whatever the order in the file.
    lifted.body.sort(key=lambda n: not isinstance(n, ast.FunctionDef))
    exec(compile(lifted, "rule", "exec"), names)
    return names[entry]


SAFE = {name: getattr(builtins, name) for name in SAFE_BUILTINS if hasattr(builtins, name)}
SAFE["print"] = lambda *args, **kwargs: None


def plain_getattr(value: Any, name: str, *default: Any) -> Any:
    """getattr without private names."""
    if name.startswith("_"):
        raise Refused(f"{name} is not allowed in a rule")
    return getattr(value, name, *default)


def namespace(request: dict[str, Any], files: Files) -> dict[str, Any]:
    """Stubs for what vLLM's and SGLang's rules call: platform, environment, logger, paths, JSON."""
    device_name = request["device_name"]
    shared_memory = request["shared_memory_optin"]

    def known_capability() -> tuple[int, ...]:
        if request["compute_capability"] is None:
            raise Refused(f"the rule asks for the compute capability of {device_name}, which the catalog does not know")
        return tuple(request["compute_capability"])

    def has_capability(wanted: Any, *rest: Any) -> bool:
        return (wanted if isinstance(wanted, tuple) else divmod(wanted, 10)) <= known_capability()

    def is_capability(wanted: Any, *rest: Any) -> bool:
        return (wanted if isinstance(wanted, tuple) else divmod(wanted, 10)) == known_capability()

    environment = request["environment"]

    class Environment:
        """vLLM's `envs`: a variable that is not set is None, as for those that matter here."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("VLLM_"):
                return environment.get(name)
            return Missing(f"envs.{name}")

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
    environ = Stub("os.environ", get=environment.get)
    deterministic = Stub("deterministic", enable_deterministic_inference=False)
    server_args = Stub("server_args", enable_deterministic_inference=False)
    imports = {
        "get_config": lambda *a: None,
        "json": Stub("json", load=files.load, loads=json.loads),
        "os": Stub("os", path=path, environ=environ, getenv=environment.get, listdir=files.listdir),
        "functools": Stub("functools", lru_cache=functools.lru_cache, cache=functools.cache),
        "lru_cache": functools.lru_cache,
        "cache": functools.cache,
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
        "getattr": plain_getattr,
        "get_context": lambda: Stub("context", server_args=server_args),
        "get_bool_env_var": lambda name, default="false": environment.get(name, default) in ("1", "true", "True"),
    }

    def stub_import(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if fromlist:
            return Stub(name, **{n: imports.get(n, Missing(f"{name}.{n}")) for n in fromlist})
        return imports.get(name.partition(".")[0], Missing(name))

    names = {"__builtins__": {**SAFE, "__import__": stub_import, "open": files.open}, "open": files.open}
    return {**names, **imports, "__file__": request["file"], "__name__": "rule"}


def evaluate(request: dict[str, Any]) -> list[list[Any]]:
    """[[how often, [tile, tuned file or None, key or None]], ...] over the counts 1..max_count."""
    files = Files(request["texts"])
    rule = lift(request["source"], request["entry"], namespace(request, files))
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
                if value is config:
                    path, key = candidate, int(k)
        tile = 1
        for part in request["result"]:
            if isinstance(config, dict):
                if part not in config:
                    raise Refused(f"the configuration at {request['counter']}={count} has no {part}")
                tile *= config[part]
            else:
                tile *= getattr(config, part)
        if runs and runs[-1][1] == [tile, path, key]:
            runs[-1][0] += 1
        else:
            runs.append([1, [tile, path, key]])
    return runs


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question: its runs, or why it is unknown."""
    try:
        return {"runs": evaluate(request)}
    except RecursionError:
        return {"unknown": "the rule recurses without end"}
    except MemoryError:
        return {"unknown": "the rule takes more memory than it may"}
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"}


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    requests = json.loads(sys.stdin.read())
    # The rule can neither open nor create a file from here on.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    json.dump([answer(request) for request in requests], sys.stdout)


if __name__ == "__main__":
    main()
