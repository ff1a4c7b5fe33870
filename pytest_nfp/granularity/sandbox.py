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
    "property",
    "repr",
    "staticmethod",
    "classmethod",
]
ALLOWED_DUNDERS = {"__file__", "__version__"}
NOT_COUNTS = {"triton_version"}
"""Keys of a tuned file that stand beside its token counts."""
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

    # Types are written with brackets and bars, and decide nothing.

    def __getitem__(self, item: Any) -> Any:
        return Missing(f"{self._name}[...]")

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


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


def without_annotations(node: ast.FunctionDef) -> ast.FunctionDef:
    """Annotations, and decorators other than caches and method kinds, decide nothing and would need their own stubs."""
    node.returns = None
    a = node.args
    for argument in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
        if argument is not None:
            argument.annotation = None
    kept = ("staticmethod", "classmethod", "property")
    node.decorator_list = [d for d in node.decorator_list if "cache" in ast.unparse(d) or ast.unparse(d) in kept]
    return node


class Member:
    """A member of an enumeration: equal to itself alone."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value


class Local(dict):  # type: ignore[type-arg]
    """The body of a class while it is made: names that it lacks are the module's."""

    def __init__(self, scope: "Scope") -> None:
        super().__init__()
        self._scope = scope

    def __missing__(self, name: str) -> Any:
        return self._scope[name]


class Scope(dict):  # type: ignore[type-arg]
    """The globals of one lifted module: a name is lifted, with what it needs, when it is first used."""

    def __init__(self, world: "World", path: str, source: str) -> None:
        super().__init__()
        self.world, self.path = world, path
        self.nodes: dict[str, ast.stmt] = {}
        self.attributes: dict[str, list[ast.Assign]] = {}
        for node in ast.parse(source).body:
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
            check(without_annotations(node))
            self._run([node])
            return dict.__getitem__(self, name)
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        if isinstance(node, ast.Assign):
            check(node)
            return self._value(node.value)
        return self._imported(node, name)

    def _run(self, body: list[ast.stmt], local: dict[str, Any] | None = None) -> None:
        module = ast.fix_missing_locations(ast.Module(body, []))
        exec(compile(module, self.path, "exec"), self, self if local is None else local)

    def _value(self, node: ast.expr) -> Any:
        return eval(compile(ast.fix_missing_locations(ast.Expression(node)), self.path, "eval"), self)

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

    def _class(self, node: ast.ClassDef) -> Any:
        """An enumeration, a record with fields, or a class with the methods that a choice of kernels asks."""
        bases = [ast.unparse(b) for b in node.bases]
        if any(b.rpartition(".")[2] in ("Enum", "StrEnum", "IntEnum") for b in bases):
            members = {}
            for item in node.body:
                if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                    members[item.targets[0].id] = Member(item.targets[0].id, ast.unparse(item.value).strip("'\""))
            return Stub(node.name, **members)
        resolved = [self._value(b) for b in node.bases if not isinstance(b, ast.Subscript)]
        methods: list[ast.stmt] = []
        fields: dict[str, Any] = {}
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("__"):
                try:
                    check(without_annotations(item))
                except Refused:
                    continue  # A method that a choice of kernels does not ask; asking it all the same says so.
                methods.append(item)
            elif (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and "ClassVar" not in ast.unparse(item.annotation)
            ):
                try:
                    fields[item.target.id] = ... if item.value is None else self._value(item.value)
                except Refused:
                    fields[item.target.id] = ...  # Its default asks for more: without a value it is missing.
        # Compiled as a class, so that super() finds where it is; its bases are those that could be lifted.
        bases_here = {f"base {i}": b for i, b in enumerate(b for b in resolved if isinstance(b, type))}
        local = Local(self)
        local.update(bases_here)
        made_node = ast.ClassDef(
            name=node.name,
            bases=[ast.Name(n, ast.Load()) for n in bases_here],
            keywords=[],
            body=[*methods, ast.Pass()],
            decorator_list=[],
        )
        self._run([ast.copy_location(made_node, node)], local)
        made = local[node.name]
        for method, function in record_methods(node.name, fields).items():
            setattr(made, method, function)
        self[node.name] = made
        for assignment in self.attributes.get(node.name, ()):
            target = assignment.targets[0]
            assert isinstance(target, ast.Attribute)
            setattr(made, target.attr, self._value(assignment.value))
        return made


def record_methods(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """__init__ and equality of a dataclass or named tuple with these fields and defaults; nothing without fields."""
    if not fields:
        return {}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        values = {f: v for f, v in fields.items() if v is not ...} | dict(zip(fields, args, strict=False)) | kwargs
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def equal(self: Any, other: Any) -> bool:
        return type(other) is type(self) and all(getattr(self, f, None) == getattr(other, f, None) for f in fields)

    return {"__init__": init, "__eq__": equal, "__hash__": lambda self: hash(name)}


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
        path = self.path(module)
        if path is not None:
            return Module(self.scope(path))
        last = module.rpartition(".")[2]
        return self.stubs.get(last, Missing(module))

    def member(self, module: str, name: str) -> Any:
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
        self._scope = scope

    def __getattr__(self, name: str) -> Any:
        return self._scope[name]


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
    return {
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
            if isinstance(config, dict):
                if part not in config:
                    raise Refused(f"the configuration at {request['counter']}={count} has no {part}")
                tile *= config[part]
            else:
                tile *= getattr(config, part)
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
    kept = sorted((name, str(value).replace(" ", "")) for name, value in config.items() if name not in result)
    return " ".join(f"{name}={value}" for name, value in kept)


class Configuration(Stub):
    """A deployment's configuration in the default environment: a switch that is not named is off."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("use_", "is_", "enable_", "has_", "disable_", "require_")):
            return False
        return super().__getattr__(attribute)


class Names(Stub):
    """A namespace of distinct tokens, one a name: torch's dtypes."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        token = Member(attribute, attribute)
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


def choose_kernel(request: dict[str, Any]) -> str:
    """The backend that a release's own selection function returns for a plain deployment, by its member's name."""
    files = Files({})
    stubs = namespace(request, files)
    defaults = defaults_of(request["sources"].get(request["environment_file"], ""))

    class Environment:
        def __getattr__(self, name: str) -> Any:
            if name in request["environment"]:
                return request["environment"][name] not in ("", "0", "false", "False")
            if name in defaults:
                return defaults[name]
            getters = world.scope(request["environment_file"]).nodes.get("environment_variables")
            if isinstance(getters, ast.Assign) and isinstance(getters.value, ast.Dict):
                for key, getter in zip(getters.value.keys, getters.value.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        check(getter)
                        return world.scope(request["environment_file"])._value(getter)()
            raise Refused(f"the default of envs.{name} can't be read")

        def is_set(self, name: str) -> bool:
            return name in request["environment"]

    torch = stubs["torch"]
    dtypes = Names("torch")
    dtypes.__dict__.update(cuda=torch.cuda, version=torch.version, dtype=object)
    platform = stubs["current_platform"]
    platform.__dict__.update(
        is_tpu=lambda: False,
        is_out_of_tree=lambda: False,
        is_neuron=lambda: False,
        device_name=request["device_name"],
        fp8_dtype=lambda: dtypes.float8_e4m3fn,
        supports_fp8=lambda: request["compute_capability"] >= [8, 9],
        is_fp8_fnuz=lambda: False,
    )
    off = lambda *a, **k: False  # noqa: E731
    stubs.update(
        envs=Environment(),
        torch=dtypes,
        rocm_aiter_ops=Stub("rocm_aiter_ops", is_fused_moe_enabled=off, is_enabled=off, is_rdna_aiter_enabled=off),
        has_deep_gemm=lambda: request["deep_gemm"],
        is_deep_gemm_supported=lambda: request["deep_gemm"] and request["compute_capability"][0] >= 9,
        prioritize_humming=lambda backends: backends,
        has_humming=off,
        scalar_types=Names("scalar_types"),
        # No model's own exceptions: a plain deployment.
        get_current_vllm_config=lambda: Stub("vllm_config", model_config=None),
        has_triton_kernels=off,
        abstractmethod=lambda f: f,
        dataclass=lambda *a, **k: a[0] if a else (lambda c: c),
        ABC=object,
        NamedTuple=object,
        Protocol=object,
    )
    for name in request["flashinfer_names"]:
        stubs[name] = lambda *a, **k: request["flashinfer"]
    world = World(request["sources"], stubs, files)
    del stubs["get_config"]

    def named(module: str, name: str) -> Any:
        value = world.member(module, name)
        if isinstance(value, Missing):
            raise Refused(f"the release has no {module}.{name}")
        return value

    base = "vllm.model_executor.layers"
    keys: dict[str, Any] = {"weight_key": None, "activation_key": None}
    module, entry = request["entry"]
    function = named(module, entry)
    code = function.__code__
    if "weight_key" in code.co_varnames[: code.co_argcount] and request["dtype"] != "bf16":
        names = (
            ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")
            if request["dtype"] == "fp8-block"
            else ("kFp8StaticTensorSym", "kFp8StaticTensorSym")
        )
        keys = dict(zip(keys, (named(f"{base}.quantization.utils.quant_utils", n) for n in names), strict=True))
    activation: Any = "silu"
    if world.path(f"{base}.fused_moe.activation") is not None:
        activation = named(f"{base}.fused_moe.activation", "MoEActivation").SILU
    routing: Any = None
    if (
        world.path(f"{base}.fused_moe.config") is not None
        and "RoutingMethodType" in world.scope(f"{base}.fused_moe.config".replace(".", "/") + ".py").nodes
    ):
        routing = named(f"{base}.fused_moe.config", "RoutingMethodType").Renormalize
    ranks = request["expert_parallel"]
    parallel = Configuration(
        "parallel",
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
        moe_parallel_config=parallel,
        is_act_and_mul=True,
        activation=activation,
        routing_method=routing,
        router_logits_dtype=dtypes.bfloat16,
        in_dtype=dtypes.bfloat16,
        moe_backend="auto",
        hidden_dim=4096,
        hidden_dim_unpadded=4096,
        intermediate_size_per_partition=1024,
        num_experts=256,
        num_local_experts=256 // ranks,
        experts_per_token=8,
        max_num_tokens=8192,
        num_logical_experts=256,
        swiglu_limit=None,
        tp_size=1,
        ep_size=ranks,
        dp_size=1,
    )
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
    if not isinstance(chosen, Member):
        raise Refused(f"{entry} returned no backend")
    return chosen.name


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


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question: its runs or its kernel, or why it is unknown."""
    try:
        if "sources" in request:
            return {"kernel": choose_kernel(request)}
        if "attention_backend" in request:
            return {"kernel": choose_attention_backend(request)}
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
