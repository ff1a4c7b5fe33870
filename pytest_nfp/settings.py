"""Every option, declared once: command line, ini file and environment, and where its value came from.

Precedence: command line, then environment (NFP_GPU for --nfp-gpu), then ini file (nfp_gpu), then default. This module
is loaded in every pytest run and imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """An option with a value that can't be used; the message names option, value and source."""


class Option(NamedTuple):
    """One option: `name` without --nfp-, how its text becomes a value, what it is for."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    help: str
    repeatable: bool = False
    flag: bool = False

    @property
    def dest(self) -> str:
        """The name in namespaces and ini files."""
        return "nfp_" + self.name.replace("-", "_")

    @property
    def environment(self) -> str:
        """The environment variable."""
        return self.dest.upper()


def _choice(values: tuple[str, ...]) -> Callable[[str], str]:
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


OPTIONS = (
    Option(
        "gpu",
        ("auto",),
        _names,
        "GPU(s) to test for: catalog names such as h20,h800, or cpu, or auto (the device here)",
    ),
    Option(
        "backend",
        (),
        _names,
        "backend release, such as vllm==0.33.0; repeatable (default: the installed one, else the baselines' releases)",
        repeatable=True,
    ),
    Option(
        "model",
        (),
        _names,
        "model(s): catalog names or paths of a Hugging Face config.json; repeatable",
        repeatable=True,
    ),
    Option(
        "routing",
        ("balanced", "skewed"),
        _names,
        "routing(s) of experts: balanced and skewed (default), uniform, trace:FILE (a CSV line token,expert,... a token)",
        repeatable=True,
    ),
    Option("batch", (), _counts, "batch size(s) b in place of the catalog's grid, such as 1,4"),
    Option("context", (), _counts, "cached tokens L in place of the catalog's grid, such as 256,4096"),
    Option("top-k", (), _counts, "experts per token k in place of the catalog's, such as 2,8,32: a sweep of k"),
    Option(
        "dtype",
        None,
        _choice(get_args(Dtype)),
        f"dtype of the weights: {', '.join(get_args(Dtype))} (default bf16 on a GPU, fp32 on a CPU)",
    ),
    Option(
        "scale",
        None,
        _choice(get_args(Scale)),
        "full models: full, or tiny, which keeps the ratios that decide granularity (default tiny on a CPU, full on a GPU)",
    ),
    Option("tolerance", 0.20, _share, "epsilon: allowed relative increase of latency over T(N0) (default 0.2)"),
    Option("match-tolerance", 0.15, _share, "allowed relative distance of a boundary from its prediction and baseline"),
    Option(
        "measure",
        "auto",
        _choice(get_args(Measure)),
        "where curves come from: auto (device, else recordings), device, recorded, none",
    ),
    Option("protocol", "adaptive", _choice(get_args(Protocol)), "how a curve is measured: adaptive, paper, quick"),
    Option(
        "timer",
        "auto",
        _choice(get_args(Timer)),
        "clock of a measurement: auto (cuda-events on a GPU), perf-counter, cuda-events, cuda-graph, cupti",
    ),
    Option("samples", False, _yes, "keep every sample in the record, for rank tests by nfp compare", flag=True),
    Option(
        "gate",
        "any",
        _choice(get_args(Gate)),
        "what fails a granularity test: any change of tiles (default), or boundary: one that moves N_max or the kernel",
    ),
    Option(
        "undecided",
        None,
        _choice(get_args(Undecided)),
        "what an UNDECIDED test is: skip or fail (default: fail where the baseline knew a granularity that is unknown now, else skip)",
    ),
    Option("require-device", False, _yes, "a boundary that can't be decided here is an error, not a skip", flag=True),
    Option("require-baseline", False, _yes, "a case without a baseline fails", flag=True),
    Option("baselines", None, Path, "folder of baselines (default: baselines/ of the project, else the shipped ones)"),
    Option("update", None, _choice(get_args(Update)), "write baselines: missing, changed or all"),
    Option("report", None, Path, "folder for reports: DIR/<gpu>/index.html and record.json"),
    Option("artifacts", None, Path, "folder of wheels and source archives to read granularity rules from"),
    Option(
        "trust-artifacts",
        False,
        _yes,
        "evaluate rules of that folder on a machine that can't confine them too (no Landlock, no seccomp)",
        flag=True,
    ),
    Option(
        "resume",
        None,
        Path,
        "journal.jsonl or record.json of a run that was stopped: what it measured is not measured again",
    ),
    Option(
        "case-timeout", 1800.0, _seconds, "seconds that one measurement may take before it is given up (default 1800)"
    ),
    Option("seed", 0, _whole, "seed of inputs and of random routing"),
)


# Not frozen, no slots: either would double what this module costs every pytest start, used or not.
@dataclass
class Settings:
    """The values in force; `sources` maps an option's name to where its value came from."""

    gpu: tuple[str, ...] = ("auto",)
    backend: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    routing: tuple[str, ...] = ("balanced", "skewed")
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    top_k: tuple[int, ...] = ()
    dtype: str | None = None
    scale: Scale | None = None
    tolerance: float = 0.20
    match_tolerance: float = 0.15
    measure: Measure = "auto"
    protocol: Protocol = "adaptive"
    timer: Timer = "auto"
    samples: bool = False
    gate: Gate = "any"
    undecided: Undecided | None = None
    require_device: bool = False
    require_baseline: bool = False
    baselines: Path | None = None
    update: Update | None = None
    report: Path | None = None
    artifacts: Path | None = None
    trust_artifacts: bool = False
    resume: Path | None = None
    case_timeout: float = 1800.0
    seed: int = 0
    sources: dict[str, str] = field(default_factory=dict, compare=False)


def add_options(parser: pytest.Parser) -> None:
    """Declare the options to pytest."""
    group = parser.getgroup("nfp", "near-free parallelism")
    for o in OPTIONS:
        kind: dict[str, Any] = {"action": "store_true", "default": None} if o.flag else {"default": None}
        if o.repeatable:
            kind["action"] = "append"
        group.addoption(f"--nfp-{o.name}", dest=o.dest, help=o.help, **kind)
        parser.addini(o.dest, help=f"{o.help} (as --nfp-{o.name})", default=None)


def read_settings(config: pytest.Config) -> Settings:
    """Settings of a pytest run. Raises SettingError."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for o in OPTIONS:
        text, source = _text(o, config)
        name = o.name.replace("-", "_")
        if text is None:
            continue
        sources[o.name] = source
        try:
            if o.repeatable:
                texts = text if isinstance(text, list) else [text]
                values[name] = tuple(v for t in texts for v in o.parse(t))
            else:
                values[name] = o.parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise SettingError(f"--nfp-{o.name}={text} (from the {source}): {error}") from error
    return Settings(**values, sources=sources)


def is_used(config: pytest.Config) -> bool:
    """Whether any option has been given: without one the plugin stays out of the run."""
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
