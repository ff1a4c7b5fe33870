"""Which kernel runs before any tile: orders of our own, and the real ones over two years of releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.cases import Backend, expand
from pytest_nfp.granularity import DeviceFacts, ExpertShape, Query, device_facts, granularity_of, kernel_choice, read
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
}


@pytest.mark.network
@pytest.mark.parametrize("version", TABLE)
def test_the_order_of_real_releases(version: str) -> None:
    """BF16, block FP8 and per-tensor FP8 on Hopper; FP8 on an A100 is Marlin throughout."""
    found = tuple(
        kernel_choice.kernel_choice(Query("vllm", version, H20, SHAPE, dtype))[0]
        for dtype in ("bf16", "fp8-block", "fp8")
    )
    assert found == TABLE[version]
    assert kernel_choice.kernel_choice(Query("vllm", version, A100, SHAPE, "fp8"))[0] == "marlin"


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "fp8_block"), [("0.11.2", "deepgemm if installed, else triton"), ("0.33.0", "flashinfer-cutlass")]
)
def test_expert_parallelism_has_an_order_of_its_own(version: str, fp8_block: str) -> None:
    """Block FP8 on Hopper leaves Triton under expert parallelism from 0.17 on; BF16 stays."""
    ranks = ExpertShape(32, 512, 2048, 8, expert_parallel=8)
    found = [kernel_choice.kernel_choice(Query("vllm", version, H20, ranks, dtype)) for dtype in ("bf16", "fp8-block")]
    assert [name for name, _ in found] == ["triton", fp8_block]
    assert "expert parallelism over 8 ranks" in found[1][1]


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


def test_a_case_of_sglang_does_not_claim_a_kernel() -> None:
    """Its choice hangs on server arguments."""
    case = next(expand("h20", Backend("sglang", "0.5.9"), "moe", catalog.model("llada-2.1-mini")))
    assert granularity_of(case).kernel == "unknown"
