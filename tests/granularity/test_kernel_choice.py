"""Which kernel runs before any tile: orders of our own, and the real ones over two years of releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.cases import expand
from pytest_nfp.granularity import (
    DeviceFacts,
    ExpertShape,
    Query,
    device_facts,
    evaluator,
    granularity_of,
    kernel_choice,
    read,
)
from pytest_nfp.recordings import NoRecording, recorded_curve, recorded_releases

from . import releases

SHAPE = ExpertShape(256, 512, 2048, 8)
H20, A100 = device_facts(catalog.gpu("h20")), device_facts(catalog.gpu("a100"))

ORACLE = """
from enum import Enum

import elsewhere.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from elsewhere.platforms import current_platform
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig


class Backend(Enum):
    FAST = "fast"
    TRITON = "triton"


def _class(backend):
    if backend == Backend.FAST:
        from vllm.model_executor.layers.fused_moe.experts import FastExperts

        return FastExperts
    from vllm.model_executor.layers.fused_moe.experts import TritonExperts

    return TritonExperts


def select_unquantized_moe_backend(moe_config: FusedMoEConfig) -> "tuple[Backend, type | None]":
    order = [Backend.FAST, Backend.TRITON]
    if envs.VLLM_PREFER_TRITON:
        order.reverse()
    for backend in order:
        supported, reason = _class(backend).is_supported_config(_class(backend), moe_config)
        if supported:
            return backend, _class(backend)
    raise ValueError("none")
"""
KERNELS = """
from abc import ABC, abstractmethod


class Experts(ABC):
    def __init__(self, config):
        self.__dict__["x"] = config

    @staticmethod
    def is_supported_config(cls, config):
        return cls._supports_current_device() and not config.is_lora_enabled, None

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool:
        raise NotImplementedError
"""
EXPERTS = """
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from elsewhere.platforms import current_platform
from elsewhere.flashinfer import has_flashinfer


class FastExperts(mk.Experts):
    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_device_capability(90) and has_flashinfer()


class TritonExperts(mk.Experts):
    @staticmethod
    def _supports_current_device() -> bool:
        return True
"""
ENVS = "VLLM_PREFER_TRITON: bool = False\nenvironment_variables = {}\n"


BASE = "vllm/model_executor/layers/fused_moe"
RELEASED = {
    f"{BASE}/fused_moe.py": releases.VLLM_RULE,
    f"{BASE}/oracle/unquantized.py": ORACLE,
    f"{BASE}/modular_kernel.py": KERNELS,
    f"{BASE}/experts/__init__.py": EXPERTS,
    f"{BASE}/layer.py": "",
    "vllm/envs.py": ENVS,
    "PKG-INFO": "Name: vllm\nRequires-Dist: flashinfer-python==1.0\n",
}


def release(folder: Path, version: str, **changed: str) -> Path:
    """A release with another oracle, requirements (pkg_info) or a Marlin kernel."""
    names = {"oracle": f"{BASE}/oracle/unquantized.py", "pkg_info": "PKG-INFO", "marlin": f"{BASE}/marlin_moe.py"}
    releases.sdist(folder, "vllm", version, RELEASED | {names[n]: text for n, text in changed.items()})
    return folder


def kernel(folder: Path, version: str, device: DeviceFacts = H20) -> tuple[str, str]:
    g = read(Query("vllm", version, device, SHAPE), folder)
    return g.kernel, g.kernel_reason


def test_an_order_asks_its_kernel_classes_over_several_modules(tmp_path: Path) -> None:
    """Imports, inheritance, enumerations and the device decide; what a class can't do here it says."""
    release(tmp_path, "99.1")
    assert kernel(tmp_path, "99.1")[0] == "fast"
    assert kernel(tmp_path, "99.1", A100)[0] == "triton"


def test_a_requirement_decides_whether_flashinfer_is_there(tmp_path: Path) -> None:
    """An extra is no requirement."""
    release(tmp_path, "99.2", pkg_info='Name: vllm\nRequires-Dist: flashinfer-python==1.0; extra == "fi"\n')
    name, reason = kernel(tmp_path, "99.2")
    assert name == "triton"
    assert "without FlashInfer" in reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("envs.VLLM_PREFER_TRITON", "envs.VLLM_NOWHERE", "the default of envs.VLLM_NOWHERE can't be read"),
        ("(moe_config:", "(moe_config, planet:", "parameters that are not known here: planet"),
        ("order = [", "order = elsewhere_order() or [", "calls elsewhere_order, for which there is no stub"),
        ("order = [", "order = ().__class__ and [", "__class__ is not allowed"),
    ],
)
def test_what_the_artifact_does_not_tell_is_unknown_with_its_reason(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    """The tiles stand all the same, with a warning that another kernel may run."""
    release(tmp_path, "99.3", oracle=ORACLE.replace(old, new))
    g = read(Query("vllm", "99.3", H20, SHAPE), tmp_path)
    assert g.kernel == "unknown"
    assert reason in g.kernel_reason
    assert g.warnings == ("which kernel runs is unknown; the tiles are those of the Triton kernel",)
    assert g.tile(1) == 16


def test_another_kernel_than_triton_is_warned_of(tmp_path: Path) -> None:
    """BLOCK_SIZE_M no longer describes what runs."""
    release(tmp_path, "99.4")
    g = read(Query("vllm", "99.4", H20, SHAPE), tmp_path)
    assert g.warnings == ("the tiles are those of the Triton kernel, which fast does not run on",)


TABLE = {
    "0.11.2": ("triton", "deepgemm if installed, else triton", "triton"),
    "0.14.1": ("triton", "deepgemm if installed, else triton", "triton"),
    "0.16.0": ("triton", "flashinfer-cutlass", "flashinfer-cutlass"),
    "0.17.1": ("triton", "triton", "flashinfer-cutlass"),
    "0.19.1": ("triton", "triton", "flashinfer-cutlass"),
    "0.20.0": ("flashinfer-cutlass", "triton", "flashinfer-cutlass"),
    "0.22.0": ("flashinfer-cutlass", "triton", "flashinfer-cutlass"),
    "0.27.1": ("triton", "triton", "flashinfer-cutlass"),
    "0.33.0": ("triton", "triton", "flashinfer-cutlass"),
    "0.34.0": ("triton", "triton", "flashinfer-cutlass"),
}


@pytest.mark.network
@pytest.mark.parametrize("version", TABLE)
def test_the_order_of_real_releases(version: str) -> None:
    """BF16, block FP8 and per-tensor FP8 on Hopper; FP8 on an A100 is Marlin throughout."""
    found = tuple(
        kernel_choice.kernel_choice(Query("vllm", version, H20, SHAPE, dtype)).kernel
        for dtype in ("bf16", "fp8-block", "fp8")
    )
    assert found == TABLE[version]
    assert kernel_choice.kernel_choice(Query("vllm", version, A100, SHAPE, "fp8")).kernel == "marlin"


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "fp8_block"), [("0.11.2", "deepgemm if installed, else triton"), ("0.33.0", "flashinfer-cutlass")]
)
def test_expert_parallelism_has_an_order_of_its_own(version: str, fp8_block: str) -> None:
    """Block FP8 on Hopper leaves Triton under expert parallelism from 0.17 on; BF16 stays."""
    ranks = ExpertShape(32, 512, 2048, 8, expert_parallel=8)
    found = [kernel_choice.kernel_choice(Query("vllm", version, H20, ranks, dtype)) for dtype in ("bf16", "fp8-block")]
    assert [choice.kernel for choice in found] == ["triton", fp8_block]
    assert "expert parallelism over 8 ranks" in found[1].reason


def test_marlins_rule_is_asked_about_the_local_experts(tmp_path: Path) -> None:
    """Expert parallelism 8 leaves a rank 32 of 256 experts: 64 rows come eight times as early, from a rule, not a missing file."""
    marlin = "def moe(M, topk, E):\n    for block_size_m in [8, 64]:\n        if M * topk / E / block_size_m < 0.9:\n            break\n"
    release(tmp_path, "99.5", oracle=ORACLE.replace("FAST", "MARLIN"), marlin=marlin)
    whole, ranks = (
        read(Query("vllm", "99.5", H20, shape), tmp_path) for shape in (SHAPE, ExpertShape(32, 512, 2048, 8, 8))
    )
    assert whole.kernel == ranks.kernel == "marlin"
    assert (whole.edges(), ranks.edges()) == ([230], [28])
    assert not ranks.warnings
    assert {r.source for r in ranks.ranges} == {"marlin's size rule"}


@pytest.mark.network
@pytest.mark.parametrize(("experts", "ends"), [(128, [115, 230, 460, 691]), (16, [14, 28, 57, 86])])
def test_marlin_sees_the_experts_of_its_rank(experts: int, ends: list[int]) -> None:
    """The first of 8, 16, 32, 48, 64 with M*k/E/size < 0.9: expert parallelism 8 leaves 16 experts, and 64 rows come early."""
    g = read(Query("vllm", "0.24.0", A100, ExpertShape(experts, 768, 2048, 8), "fp8"))
    assert [tile for _, _, tile in g.tiles()] == [8, 16, 32, 48, 64]
    assert g.edges() == ends
    assert not any("tuned file" in w for w in g.warnings)


@pytest.mark.network
@pytest.mark.parametrize("gpu", ["h200", "h100", "l40s", "b200"])
def test_the_chosen_kernel_is_the_one_that_was_recorded(gpu: str) -> None:
    """Recordings made through the layer name its kernel class: the order gives the same.

    Older tables (kernel vllm_fused_moe) called the Triton function past the order, so they say nothing of it.
    """
    compared = 0
    for backend in recorded_releases(gpu, "moe"):
        for model in ("llada-2.1-mini", "qwen3-30b-a3b"):
            case = next(expand(gpu, backend, "moe", catalog.model(model)))
            try:
                recorded = recorded_curve(case).kernel
            except NoRecording:
                continue
            layer = "vllm_unquantizedfusedmoe_"
            if recorded.startswith(layer):
                ran = recorded.removeprefix(layer).rpartition("_")[0].replace("_", "-")
                assert granularity_of(case, use_table=False).kernel == ran
                compared += 1
    assert compared


CLASSES = {
    "base": """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Generic, NamedTuple, TypeVar, cast

Kind = TypeVar("Kind", bound=Enum)
_UNSET = cast("str | None", object())


class Answer(NamedTuple):
    is_supported: bool
    reason: str | None = None


@dataclass(frozen=True)
class Limits:
    capability: int = 80
    refused: tuple[str, ...] = ()
    seen: list[str] = field(default_factory=list)


class Oracle(ABC, Generic[Kind]):
    name: ClassVar[str]
    limits = Limits()

    def __init__(self, config, key: "str | None" = None) -> None:
        self.config, self.key = config, key

    @abstractmethod
    def classes(self, kind: Kind) -> "list[type]": ...

    @property
    def is_gated(self) -> bool:
        return self.config.is_act_and_mul

    @classmethod
    def called(cls) -> str:
        return cls.name.lower()

    def probe(self, kind: Kind, key=_UNSET) -> Answer:
        asked = self.key if key is _UNSET else key
        for experts in self.classes(kind):
            if experts.limits(self).capability and asked is None:
                return experts.answer(self)
        return Answer(False, f"{self.called()} has none")
""",
    "oracle": """
from enum import Enum, auto

from elsewhere.platforms import current_platform
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.base import Answer, Limits, Oracle


class Backend(Enum):
    FAST = auto()
    TRITON = auto()

    @property
    def is_fast(self) -> bool:
        return self is Backend.FAST


class Slow:
    @staticmethod
    def limits(oracle) -> Limits:
        return Limits()

    @staticmethod
    def answer(oracle) -> Answer:
        return Answer(True)


class Fast(Slow):
    @staticmethod
    def answer(oracle) -> Answer:
        if oracle.config.activation not in [MoEActivation.SILU]:
            return Answer(False, "activation")
        return Answer(is_supported=oracle.is_gated and current_platform.is_device_capability_family(90))


class Mine(Oracle[Backend]):
    name = "Mine"

    def __init__(self, config) -> None:
        super().__init__(config)

    def classes(self, kind):
        return [Fast] if kind.is_fast else [Slow]


def select_unquantized_moe_backend(moe_config):
    oracle = Mine(moe_config)
    for kind in Backend:
        if oracle.probe(kind).is_supported:
            return kind, None
    raise ValueError("none")
""",
    "activation": """
from enum import Enum


class MoEActivation(Enum):
    SILU = "silu"
    RELU2_NO_MUL = "relu2_no_mul"
""",
}


def of_classes(folder: Path, version: str, **changed: str) -> Path:
    """A release whose choice is made by classes over several files."""
    texts = CLASSES | changed
    files = {
        f"{BASE}/oracle/base.py": texts["base"],
        f"{BASE}/oracle/unquantized.py": texts["oracle"],
        f"{BASE}/activation.py": texts["activation"],
    }
    releases.sdist(folder, "vllm", version, RELEASED | files)
    return folder


def test_a_choice_by_classes_over_modules_is_evaluated(tmp_path: Path) -> None:
    """Abstract generic bases, dataclasses, enumerations, named tuples, properties, class methods and super() decide as Python says."""
    of_classes(tmp_path, "98.1")
    assert kernel(tmp_path, "98.1")[0] == "fast"
    assert kernel(tmp_path, "98.1", A100)[0] == "triton"


def test_the_choice_is_asked_with_the_models_activation(tmp_path: Path) -> None:
    """Experts without a gate, of a squared ReLU, take another kernel; an activation that the release lacks is unknown."""
    of_classes(tmp_path, "98.2")

    def chosen(activation: str) -> kernel_choice.Choice:
        shape = ExpertShape(256, 512, 2048, 8, activation=activation, gated=activation == "silu")
        return kernel_choice.kernel_choice(Query("vllm", "98.2", H20, shape), tmp_path)

    assert chosen("silu").kernel == "fast"
    assert chosen("relu2").kernel == "triton"
    assert "no activation 'gelu_no_mul' of experts" in chosen("gelu").reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("    while True:\n        pass\n", "did not end within"),
        ("    return select_unquantized_moe_backend(moe_config)\n", "recurses without end"),
        ("    raise OSError('no such kernel')\n", "OSError: no such kernel"),
        ("    from vllm.nowhere import choose\n    return choose()\n", "calls vllm.nowhere.choose"),
        ("    return 10 ** 10 ** 10\n", "did not end within"),
        ("    return [0] * (1 << 40)\n", "takes more memory than it may"),
    ],
)
def test_broken_code_is_unknown_with_its_reason_in_time(tmp_path: Path, code: str, reason: str) -> None:
    """A loop, a recursion, an exception, a module that is not there: all are answers within ten seconds of processor time."""
    of_classes(tmp_path, "98.3", oracle=f"def select_unquantized_moe_backend(moe_config):\n{code}")
    found = kernel_choice.kernel_choice(Query("vllm", "98.3", H20, SHAPE), tmp_path)
    assert found.kernel == "unknown"
    assert reason in found.reason
    assert evaluator.SECONDS_A_QUESTION < 10


def test_the_questions_after_one_that_loops_are_answered(tmp_path: Path) -> None:
    """One device's loop takes no other device's answer away."""
    loop = "    if current_platform.is_device_capability_family(80):\n        while True:\n            pass\n"
    begin = "def select_unquantized_moe_backend(moe_config):\n"
    of_classes(tmp_path, "98.4", oracle=CLASSES["oracle"].replace(begin, begin + loop))
    b200 = device_facts(catalog.gpu("b200"))
    queries = [Query("vllm", "98.4", device, SHAPE) for device in (H20, A100, b200)]
    found = kernel_choice.kernel_choices(queries, tmp_path)
    assert [choice.kernel for choice in found] == ["fast", "unknown", "triton"]


def test_a_choice_by_the_devices_name_is_asked_with_it(tmp_path: Path) -> None:
    """Two devices of one compute capability: a release that compares names gets them, also where it would catch what goes wrong."""
    begin = "def select_unquantized_moe_backend(moe_config):\n"
    by_name = (
        "    try:\n        if 'H200' in current_platform.get_device_name():\n            return Backend.TRITON, None\n"
        "    except Exception:\n        pass\n"
    )
    of_classes(tmp_path, "98.6", oracle=CLASSES["oracle"].replace(begin, begin + by_name))
    h200 = device_facts(catalog.gpu("h200"))
    found = kernel_choice.kernel_choices([Query("vllm", "98.6", device, SHAPE) for device in (H20, h200)], tmp_path)
    assert [choice.kernel for choice in found] == ["fast", "triton"]


def test_the_code_of_an_unknown_choice_is_told(tmp_path: Path) -> None:
    """Comments, docstrings and annotations are no code; a method that the choice asks is, and one that it does not ask is none."""
    unreadable = CLASSES["oracle"].replace("    oracle = Mine", "    oracle = elsewhere() or Mine")
    of_classes(tmp_path, "97.1", oracle=unreadable)
    commented = unreadable.replace(
        "    def classes(self, kind):", "    def classes(self, kind: int) -> list:\n        'All.'"
    )
    of_classes(tmp_path, "97.2", oracle=f"# Text.\n{commented}\n\ndef unused():\n    return 1\n")
    of_classes(tmp_path, "97.3", oracle=unreadable, base=CLASSES["base"].replace("asked is None", "asked is not None"))
    of_classes(tmp_path, "97.4", oracle=unreadable.replace("class Mine", "class Mine2").replace("Mine(", "Mine2("))
    a, b, c, d = (
        kernel_choice.kernel_choice(Query("vllm", version, H20, SHAPE), tmp_path).code
        for version in ("97.1", "97.2", "97.3", "97.4")
    )
    assert a and a == b
    assert {name for name, _ in set(a) ^ set(c)} == {f"{BASE}/oracle/base.py: Oracle.probe"}
    assert a != d


@pytest.mark.network
@pytest.mark.parametrize(
    ("activation", "before", "after"), [("silu", "trtllm", "trtllm"), ("relu2", "cutlass", "trtllm")]
)
def test_experts_of_a_squared_relu_left_cutlass_in_0_24(activation: str, before: str, after: str) -> None:
    """FlashInfer's TRTLLM experts of vLLM took SILU alone in 0.23.0, on a B200."""
    b200 = device_facts(catalog.gpu("b200"))
    shape = ExpertShape(128, 2688, 4096, 8, activation=activation, gated=activation == "silu")
    found = [kernel_choice.kernel_choice(Query("vllm", v, b200, shape)).kernel for v in ("0.23.0", "0.24.0")]
    assert found == [f"flashinfer-{before}", f"flashinfer-{after}"]
