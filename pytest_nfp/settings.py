"""Every option, declared once for command line, ini file and environment. Errors name the source of a value.

Precedence: command line, then environment (NFP_GPU for --nfp-gpu), then ini file (nfp_gpu), then default. This module
is loaded in every pytest run and imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import pytest

Measure = Literal["auto", "device", "recorded", "none"]
Protocol = Literal["adaptive", "paper", "quick"]
Timer = Literal["auto", "perf-counter", "cuda-events", "cuda-graph", "cupti"]
Gate = Literal["any", "boundary"]
Scale = Literal["full", "tiny"]
Dtype = Literal["bf16", "fp16", "fp32", "fp8", "fp8-block", "int4"]
Undecided = Literal["skip", "fail"]
Update = Literal["missing", "changed", "all"]


class SettingError(Exception):
    """An option has a value that can't be used. The message names option, value and source."""


class Option(NamedTuple):
    """One option."""

    name: str
    """Its name without --nfp-."""
    default: Any
    """Its value where it is not given."""
    parse: Callable[[str], Any]
    """Turns its text into a value. Raises ValueError."""
    help: str
    """What it is for."""
    repeatable: bool = False
    """Whether it can be given several times."""
    flag: bool = False
    """Whether it takes no value on the command line."""

    @property
    def dest(self) -> str:
        """Its name in namespaces and ini files."""
        return "nfp_" + self.name.replace("-", "_")

    @property
    def environment(self) -> str:
        """Its environment variable."""
        return self.dest.upper()


def _choice(alias: Any) -> Callable[[str], str]:
    values: tuple[str, ...] = get_args(alias)

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return text

    return parse


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 10:
        raise ValueError("must be a share between 0 and 10, such as 0.2 for 20%")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must be a whole number of at least 0")
    return value


def _counts(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(t) for t in text.split(",") if t.strip())
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ValueError("must be whole numbers of at least 1, such as 1,2,4")
    return tuple(dict.fromkeys(values))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a number of seconds above 0")
    return value


def _yes(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("must be true or false")


def _names(text: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in text.split(",") if n.strip())


def _as(parse: Callable[[str], Any], help_text: str, *, repeatable: bool = False) -> dict[str, Any]:
    return {"parse": parse, "help": help_text, "repeatable": repeatable}


def _flag(help_text: str) -> dict[str, Any]:
    return {"parse": _yes, "help": help_text, "flag": True}


# Neither frozen nor with slots: either would double the time that this module adds to every pytest start.
@dataclass
class Settings:
    """The values in force. Each field is one option: top_k is --nfp-top-k, with the field's default."""

    gpu: tuple[str, ...] = field(
        default=("auto",),
        metadata=_as(_names, "GPU(s) to test for: catalog names such as h20,h800, or cpu, or auto (the device here)"),
    )
    backend: tuple[str, ...] = field(
        default=(),
        metadata=_as(
            _names,
            "backend release, such as vllm==0.33.0; repeatable (default: the installed one, else the baselines' releases)",
            repeatable=True,
        ),
    )
    model: tuple[str, ...] = field(
        default=(),
        metadata=_as(
            _names, "model(s): catalog names or paths of a Hugging Face config.json; repeatable", repeatable=True
        ),
    )
    routing: tuple[str, ...] = field(
        default=("balanced", "skewed"),
        metadata=_as(
            _names,
            "routing(s) of experts: balanced, skewed, uniform, trace:FILE (a CSV line token,expert,... a token)",
            repeatable=True,
        ),
    )
    batch: tuple[int, ...] = field(
        default=(), metadata=_as(_counts, "batch size(s) b in place of the catalog's grid, such as 1,4")
    )
    context: tuple[int, ...] = field(
        default=(), metadata=_as(_counts, "cached tokens L in place of the catalog's grid, such as 256,4096")
    )
    top_k: tuple[int, ...] = field(
        default=(), metadata=_as(_counts, "experts per token k in place of the catalog's, such as 2,8,32: a sweep of k")
    )
    dtype: str | None = field(
        default=None,
        metadata=_as(
            _choice(Dtype), f"dtype of the weights: {', '.join(get_args(Dtype))} (default bf16 on a GPU, fp32 on a CPU)"
        ),
    )
    scale: Scale | None = field(
        default=None,
        metadata=_as(
            _choice(Scale),
            "full models: full, or tiny, which keeps the ratios that decide granularity (default tiny on a CPU, full on a GPU)",
        ),
    )
    tolerance: float = field(
        default=0.20, metadata=_as(_share, "epsilon: allowed relative increase of latency over T(N0)")
    )
    match_tolerance: float = field(
        default=0.15, metadata=_as(_share, "allowed relative distance of a boundary from its prediction and baseline")
    )
    measure: Measure = field(
        default="auto",
        metadata=_as(
            _choice(Measure), "where curves come from: auto (device, else recordings), device, recorded, none"
        ),
    )
    protocol: Protocol = field(
        default="adaptive", metadata=_as(_choice(Protocol), "how a curve is measured: adaptive, paper, quick")
    )
    timer: Timer = field(
        default="auto",
        metadata=_as(
            _choice(Timer),
            "clock of a measurement: auto (cuda-events on a GPU), perf-counter, cuda-events, cuda-graph, cupti",
        ),
    )
    samples: bool = field(
        default=False, metadata=_flag("keep every sample in the record, for rank tests by nfp compare")
    )
    gate: Gate = field(
        default="any",
        metadata=_as(
            _choice(Gate),
            "what fails a granularity test: any change of tiles, or boundary: one that moves N_max or the kernel",
        ),
    )
    undecided: Undecided | None = field(
        default=None,
        metadata=_as(
            _choice(Undecided),
            "what an UNDECIDED test is: skip or fail (default: fail where the baseline knew a granularity that is unknown now, else skip)",
        ),
    )
    require_device: bool = field(
        default=False, metadata=_flag("a boundary that can't be decided here is an error, not a skip")
    )
    require_baseline: bool = field(default=False, metadata=_flag("a case without a baseline fails"))
    baselines: Path | None = field(
        default=None,
        metadata=_as(Path, "folder of baselines (default: baselines/ of the project, else the shipped ones)"),
    )
    update: Update | None = field(
        default=None, metadata=_as(_choice(Update), "write baselines: missing, changed or all")
    )
    report: Path | None = field(
        default=None, metadata=_as(Path, "folder for reports: DIR/<gpu>/index.html and record.json")
    )
    artifacts: Path | None = field(
        default=None, metadata=_as(Path, "folder of wheels and source archives to read granularity rules from")
    )
    trust_artifacts: bool = field(
        default=False,
        metadata=_flag(
            "evaluate rules of that folder even where this machine can't confine them (no Landlock, no seccomp)"
        ),
    )
    resume: Path | None = field(
        default=None,
        metadata=_as(
            Path, "journal.jsonl or record.json of a run that was stopped: what it measured is not measured again"
        ),
    )
    case_timeout: float = field(
        default=1800.0, metadata=_as(_seconds, "seconds that one measurement may take before it is given up")
    )
    seed: int = field(default=0, metadata=_as(_whole, "seed of inputs and of random routing"))


OPTIONS = tuple(Option(f.name.replace("_", "-"), f.default, **f.metadata) for f in fields(Settings))


def help_of(option: Option) -> str:
    """What an option is for, with its default where it has one."""
    if option.default is None or option.default is False or option.default == ():
        return option.help
    default = (
        ",".join(option.default)
        if isinstance(option.default, tuple)
        else f"{option.default:g}"
        if isinstance(option.default, float)
        else option.default
    )
    return f"{option.help} (default {default})"


def add_options(parser: pytest.Parser) -> None:
    """Declare the options to pytest."""
    group = parser.getgroup("nfp", "near-free parallelism")
    for o in OPTIONS:
        kind: dict[str, Any] = {"action": "store_true", "default": None} if o.flag else {"default": None}
        if o.repeatable:
            kind["action"] = "append"
        group.addoption(f"--nfp-{o.name}", dest=o.dest, help=help_of(o), **kind)
        parser.addini(o.dest, help=f"{help_of(o)} (as --nfp-{o.name})", default=None)


def read_settings(config: pytest.Config) -> Settings:
    """The settings of a pytest run. Raises SettingError."""
    values: dict[str, Any] = {}
    for o in OPTIONS:
        text, source = _text(o, config)
        name = o.name.replace("-", "_")
        if text is None:
            continue
        try:
            if o.repeatable:
                texts = text if isinstance(text, list) else [text]
                values[name] = tuple(v for t in texts for v in o.parse(t))
            else:
                values[name] = o.parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise SettingError(f"--nfp-{o.name}={text} (from the {source}): {error}") from error
    return Settings(**values)


def is_used(config: pytest.Config) -> bool:
    """Whether any option was given. Without one the plugin stays out of the run."""
    return any(_text(o, config)[0] is not None for o in OPTIONS)


def _text(o: Option, config: pytest.Config) -> tuple[Any, str]:
    given = config.getoption(o.dest, None)
    if given is not None:
        return given, "command line"
    if o.environment in os.environ:
        return os.environ[o.environment], f"environment variable {o.environment}"
    ini = config.getini(o.dest)
    if ini:
        return str(ini), f"ini file, {o.dest}"
    return None, "default"
