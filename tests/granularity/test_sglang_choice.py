"""The runner that SGLang takes for `auto`: server arguments and quantisation methods of our own, and the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.granularity import ExpertShape, Query, device_facts, kernel_choice

from . import releases

SHAPE = ExpertShape(128, 768, 2048, 8)
UTILS = """
from enum import Enum


class MoeA2ABackend(Enum):
    NONE = "none"
    DEEPEP = "deepep"

    def is_deepep(self):
        return self == MoeA2ABackend.DEEPEP


class MoeRunnerBackend(Enum):
    AUTO = "auto"
    TRITON = "triton"
    DEEP_GEMM = "deep_gemm"
    FAST = "fast"

    def is_auto(self):
        return self == MoeRunnerBackend.AUTO
"""
METHODS = """
from sglang.srt.layers.moe import MoeRunner, MoeRunnerBackend, get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.utils import is_hip

_is_hip = is_hip()


class Fp8MoEMethod:
    def __init__(self, quant_config):
        self.quant_config = quant_config

    @staticmethod
    def is_deepgemm_moe_runner_backend_enabled():
        from sglang.srt.layers import deep_gemm_wrapper

        return deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM

    def create_moe_runner(self, layer, moe_runner_config):
        backend = get_moe_runner_backend()
        if backend.is_auto() and not _is_hip:
            backend = MoeRunnerBackend.DEEP_GEMM if self.is_deepgemm_moe_runner_backend_enabled() else MoeRunnerBackend.TRITON
        self.runner = MoeRunner(backend, moe_runner_config)


class UnquantizedFusedMoEMethod:
    def create_moe_runner(self, layer, moe_runner_config):
        self.runner = MoeRunner(MoeRunnerBackend.TRITON, moe_runner_config)
"""
METHODS_OF_THE_CLASS = """
from sglang.srt.utils import get_quantization_config, is_sm100_supported
import logging

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class ServerArgs:
    quantization: str = None
    moe_runner_backend: str = "auto"
    page_size: int = 1
    unreadable: int = elsewhere()

    def __post_init__(self):
        self._handle_models()

    def _handle_models(self):
        hf_config = self.get_model_config().hf_config
        model_arch = hf_config.architectures[0]
        if model_arch in ["GemmaForCausalLM"]:
            self.page_size = elsewhere_too(self.unreadable)
        elif model_arch in ["Qwen3MoeForCausalLM"]:
            assert self.unreadable
            if is_sm100_supported():
                quant = hf_config.quantization_config
                if self.quantization is None and quant is not None:
                    self.quantization = quant.get("quant_method")
                if self.quantization in ("fp8", None) and self.moe_runner_backend == "auto":
                    self.moe_runner_backend = "fast"
                    logger.info("fast")
"""
FUNCTIONS = """
from sglang.srt.arg_groups.base import _register_for, resolving_view
from sglang.srt.runtime_context import get_platform


@_register_for("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM")
def _qwen(server_args, hf_config):
    cfg = resolving_view(server_args)
    overrides = {}
    if get_platform().is_sm100 and cfg.moe_runner_backend == "auto" and cfg.speculative_thing is None:
        overrides["moe_runner_backend"] = "fast"
    overrides["page_size"] = elsewhere(cfg)
    return overrides
"""
BASE = "sglang/srt"
OLD = {
    f"{BASE}/server_args.py": METHODS_OF_THE_CLASS,
    f"{BASE}/layers/moe/utils.py": UTILS,
    f"{BASE}/layers/quantization/fp8.py": METHODS,
    f"{BASE}/layers/quantization/unquant.py": METHODS,
    f"{BASE}/layers/moe/fused_moe_triton/fused_moe.py": releases.VLLM_RULE,
    "PKG-INFO": "Name: sglang\nRequires-Dist: torch==2.9.1\n",
}
NEW = OLD | {
    f"{BASE}/server_args.py": "class ServerArgs:\n    pass\n\nServerArgs = make(ServerArgs)\n",
    f"{BASE}/arg_groups/model_overrides/qwen.py": FUNCTIONS,
    f"{BASE}/arg_groups/fields/moe.py": "class Moe:\n    moe_runner_backend: str = 'auto'\n    speculative_thing: str = None\n",
}


def chosen(folder: Path, files: dict[str, str], gpu: str, dtype: str, architecture: str) -> kernel_choice.Choice:
    """The choice of a release of these files."""
    releases.sdist(folder, "sglang", "99.1", files)
    query = Query("sglang", "99.1", device_facts(catalog.gpu(gpu)), SHAPE, dtype, architecture=architecture)
    return kernel_choice.kernel_choice(query, folder)


@pytest.mark.parametrize("files", [OLD, NEW])
@pytest.mark.parametrize(
    ("gpu", "dtype", "architecture", "kernel"),
    [
        ("b200", "bf16", "Qwen3MoeForCausalLM", "fast"),
        ("b200", "bf16", "", "triton"),
        ("h20", "bf16", "Qwen3MoeForCausalLM", "triton"),
        ("h20", "fp8-block", "Qwen3MoeForCausalLM", "deep-gemm if installed, else triton"),
        ("a100", "fp8", "MixtralForCausalLM", "triton"),
    ],
)
def test_the_runner_is_that_of_the_models_class_gpu_and_dtype(
    tmp_path: Path, files: dict[str, str], gpu: str, dtype: str, architecture: str, kernel: str
) -> None:
    """Methods of the arguments and functions that are registered for a class: what has no say in the runner need not be readable."""
    found = chosen(tmp_path, files, gpu, dtype, architecture)
    assert (found.kernel, found.code) == (kernel, ())


def test_what_no_release_tells_is_named(tmp_path: Path) -> None:
    """The version of the driver, an argument without a readable default, a runner that the release does not name."""
    driver = FUNCTIONS.replace("get_platform().is_sm100 and", "get_nvidia_driver_version() >= (595,) and")
    path = f"{BASE}/arg_groups/model_overrides/qwen.py"
    for text, reason in (
        (driver, "the version of the NVIDIA driver, which no release tells"),
        (FUNCTIONS.replace("cfg.speculative_thing", "cfg.planet"), "server_args.planet, which is not known here"),
        (FUNCTIONS.replace('"fast"', '"faster"'), "'faster' is not a valid MoeRunnerBackend"),
    ):
        (tmp_path / reason[:8]).mkdir()
        found = chosen(tmp_path / reason[:8], NEW | {path: text}, "b200", "bf16", "Qwen3MoeForCausalLM")
        assert found.kernel == "unknown"
        assert reason in found.reason
        assert found.code


def test_a_release_without_a_runner_is_undecidable(tmp_path: Path) -> None:
    """Before 0.5.2 the quantisation method chose inside its forward."""
    plain = OLD | {f"{BASE}/layers/quantization/unquant.py": "class UnquantizedFusedMoEMethod:\n    pass\n"}
    assert "it chooses in its forward" in chosen(tmp_path, plain, "h20", "bf16", "").reason


@pytest.mark.network
@pytest.mark.parametrize(
    ("release", "gpu", "architecture", "kernels"),
    [
        ("0.5.9", "h20", "LLaDA2MoeModelLM", ["triton", "triton", "triton"]),
        ("0.5.9", "b200", "Qwen3MoeForCausalLM", ["flashinfer-trtllm"] * 3),
        ("0.5.15", "b200", "DeepseekV3ForCausalLM", ["flashinfer-trtllm"] * 3),
        ("0.5.23", "h20", "LLaDA2MoeModelLM", ["triton", "triton", "triton"]),
        ("0.5.23", "h200", "Qwen3MoeForCausalLM", ["triton", "triton", "triton"]),
        ("0.5.23", "b200", "Qwen3MoeForCausalLM", ["flashinfer-trtllm"] * 3),
        ("0.5.23", "b200", "MixtralForCausalLM", ["triton", "triton", "triton"]),
    ],
)
def test_the_runners_of_real_releases(release: str, gpu: str, architecture: str, kernels: list[str]) -> None:
    """BF16, FP8 a tensor and FP8 a block."""
    device = device_facts(catalog.gpu(gpu))
    queries = [
        Query("sglang", release, device, SHAPE, d, architecture=architecture) for d in ("bf16", "fp8", "fp8-block")
    ]
    assert [c.kernel for c in kernel_choice.kernel_choices(queries)] == kernels
