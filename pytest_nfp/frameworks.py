"""One record for each framework, with all that is known of it. A package adds its own by an entry point.

An entry point of the group pytest_nfp.frameworks names a `Framework`:

    [project.entry-points."pytest_nfp.frameworks"]
    my-kernels = "my_kernels:FRAMEWORK"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points

GROUP = "pytest_nfp.frameworks"
DRAFTS = "drafts"
"""The variant of vLLM's engine that verifies drafts. Its forward computes logits for all drafts."""


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework: its modules, its tile rule, its kernels, and the files that hold them."""

    name: str
    """Its name for pip."""
    modules: tuple[str, ...]
    """The modules that it has kernels for: dense, moe, attention, model (an engine for whole models)."""
    aliases: tuple[str, ...] = ()
    """Other names that users write."""

    package: str = ""
    """The Python package to import; empty where nothing of it is imported."""
    extra: str = ""
    """The extra of pytest-nfp that installs it; empty for none."""

    rule: str = ""
    """The module whose tile rule its releases publish; empty for none."""
    rule_reader: str = ""
    """The Python module that reads the rule: granularities(queries, archives) -> a map, or RuleUnknown, for each."""
    rule_files: tuple[str, ...] = ()
    """Paths of the rule in a wheel, newest first, for readers that need them."""
    files: tuple[str, ...] = ()
    """Regular expressions for paths in a release. Only files that match are opened."""
    choice_files: str = ""
    """The one of `files` for the code that chooses between kernels."""
    index: str = "final"
    """Which of its releases on the package index hold the rule: "final", "pre-release" or "none"."""
    capability: tuple[tuple[int, int], str] | None = None
    """The lowest compute capability that it has kernels for, and the source of that."""
    asks_architecture: bool = False
    """Whether its rule depends on the model's class."""
    not_covered: str = ""
    """What its rule does not cover, as a sentence for readers who compare two releases."""

    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module -> further kernels, or ways to run the engine, that are measured on a GPU besides the unnamed default."""
    cpu_kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module -> its kernels on a CPU, where it has several. The first one is what transformers' modules run."""
    has_mla: bool = False
    """Whether its MLA is described, by a rule on a GPU and a forward."""
    oldest: str = ""
    """The oldest release whose GPU calls are known."""
    calls_vendor_gemm: bool = False
    """Whether its GEMMs are the vendor's. Then another framework's calibration of them describes them too."""
    triton_experts: str = ""
    """The name of its fused experts' Triton kernel in recorded tables."""

    attention: str = ""
    """The package whose attention predictions assume where the user gives none."""
    pins_attention: bool = False
    """Whether each of its releases requires one release of that package."""
    engine_attention: str = ""
    """The framework whose attention kernel its engine runs on a GPU, where the kernel is not its own."""
    architectures: tuple[str, str, str] | None = None
    """Where its engine names the architectures that it runs: package, file or folder in it, pattern of a name there."""

    @property
    def unruled(self) -> frozenset[str]:
        """Modules for which only a boundary can be asked on a GPU. Not dense: a vendor's GEMMs have recorded curves."""
        return frozenset(self.modules) - {self.rule, "dense"}


_METADATA = r"(?:^|/)[^/]+\.dist-info/METADATA$|^PKG-INFO$"
_VLLM_CHOICE = (
    r"(?:^|/)vllm/(?:model_executor/layers/fused_moe/.+\.py"
    r"|model_executor/layers/quantization/(?:fp8|utils/quant_utils|utils/flashinfer_utils)\.py|envs\.py)$"
)
_SGLANG_CHOICE = (
    r"(?:^|/)sglang/srt/(?:server_args\.py|arg_groups/.+\.py|environ\.py|utils\.py|utils/common\.py"
    r"|layers/moe/(?:utils|fused_moe_triton/layer)\.py|layers/quantization/(?:fp8|unquant)\.py)$"
)
_ATTENTION, _EXPERTS = "pytest_nfp.granularity.attention", "pytest_nfp.granularity.fused_moe"
OURS = (
    Framework(
        "flash-attn",
        ("attention",),
        ("flash-attention", "flash_attn"),
        package="flash_attn",
        extra="flash-attn",
        rule="attention",
        rule_reader=_ATTENTION,
        files=(r"^csrc/flash_attn/src/flash_fwd_launch_template\.h$",),
        capability=((8, 0), "flash-attention's README: Ampere, Ada, or Hopper"),
        variants={"attention": ("contiguous",)},
        oldest="2.5.9",
    ),
    Framework(
        "flashinfer-python",
        ("attention",),
        ("flashinfer",),
        package="flashinfer",
        extra="flashinfer",
        rule="attention",
        rule_reader=_ATTENTION,
        files=(r"(?:^|/)include/flashinfer/(?:utils|attention/scheduler)\.cuh$", r"(?:^|/)flashinfer/utils\.py$"),
        capability=((7, 5), "FlashInfer's README: Turing and later"),
        not_covered="FlashInfer's MoE kernels publish no tile rule: nothing is said of them, attention alone was compared",
        variants={"attention": ("decode-at-1",)},
        has_mla=True,
        oldest="0.5.3",
    ),
    Framework(
        "flash-attn-3",
        ("attention",),
        rule="attention",
        rule_reader=_ATTENTION,
        index="none",
        capability=((8, 0), "flash-attention's hopper/setup.py: 8.0, 8.6, 9.0"),
    ),
    Framework(
        "flash-attn-4",
        ("attention",),
        rule="attention",
        rule_reader=_ATTENTION,
        files=(r"(?:^|/)flash_attn/cute/interface\.py$",),
        index="pre-release",
        capability=((9, 0), "flash-attention's README: FlashAttention-4 is for Hopper and Blackwell"),
    ),
    Framework(
        "transformers",
        ("model",),
        package="transformers",
        extra="transformers",
        architectures=(
            "transformers",
            "models/auto/modeling_auto.py",
            r'MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b(?:(?!\n\)).)*"{}"',
        ),
    ),
    Framework(
        "vllm",
        ("dense", "moe", "attention", "model"),
        package="vllm",
        extra="vllm",
        rule="moe",
        rule_reader=_EXPERTS,
        rule_files=("vllm/model_executor/layers/fused_moe/fused_moe.py",),
        files=(r"(?:^|/)vllm/model_executor/layers/fused_moe/configs/.+\.json$", _VLLM_CHOICE, _METADATA),
        choice_files=_VLLM_CHOICE,
        capability=((7, 0), "vLLM's installation guide: compute capability 7.0 or higher"),
        not_covered="vLLM's attention backends and dense GEMMs publish no tile rule: experts alone were compared",
        variants={"model": (DRAFTS,)},
        oldest="0.9.1",
        calls_vendor_gemm=True,
        triton_experts="vllm_fused_moe",
        attention="flash-attn",
        architectures=("vllm", "model_executor/models/registry.py", r'"{}":'),
    ),
    Framework(
        "sglang",
        ("dense", "moe", "model"),
        package="sglang",
        extra="sglang",
        rule="moe",
        rule_reader=_EXPERTS,
        # The function moved out of fused_moe.py in 0.5.3 and to moe_runner in 0.5.12.
        rule_files=(
            "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py",
            "sglang/srt/layers/moe/fused_moe_triton/fused_moe_triton_config.py",
            "sglang/srt/layers/moe/fused_moe_triton/fused_moe.py",
        ),
        files=(
            r"(?:^|/)sglang/srt/layers/moe/(?:fused_moe_triton|moe_runner/triton_utils)/"
            r"(?:fused_moe\.py|fused_moe_triton_config\.py|configs/.+\.json)$",
            _SGLANG_CHOICE,
            _METADATA,
        ),
        choice_files=_SGLANG_CHOICE,
        capability=((7, 5), "sglang.srt.utils: 'SGLang only supports sm75 and above'"),
        asks_architecture=True,
        not_covered="SGLang's attention backends and dense GEMMs publish no tile rule: experts alone were compared",
        oldest="0.5.9",
        calls_vendor_gemm=True,
        triton_experts="sglang_fused_moe_triton",
        attention="flashinfer-python",
        pins_attention=True,
        engine_attention="flashinfer-python",
        architectures=("sglang", "srt/models", r"EntryClass = \[?[^\]=]*\b{}\b"),
    ),
    Framework(
        "torch",
        ("dense", "moe", "attention"),
        cpu_kernels={"dense": ("matmul", "onednn-packed"), "moe": ("grouped_mm",), "attention": ("sdpa",)},
        calls_vendor_gemm=True,
    ),
    Framework(
        "nano-vllm",
        ("model",),
        package="nanovllm",
        engine_attention="flash-attn",
        architectures=("nanovllm", "models", r"class {}\("),
    ),
)
"""The project's own records. Cases follow their order."""


def known() -> dict[str, Framework]:
    """Name -> framework: the project's own, and those of installed packages.

    A package can't take one of the project's names.
    """
    return _read()[0]


def broken() -> dict[str, str]:
    """Name -> why an entry point of a package gives no record. Only that framework is left out."""
    return _read()[1]


@lru_cache(maxsize=1)
def _read() -> tuple[dict[str, Framework], dict[str, str]]:
    records, reasons = {f.name: f for f in OURS}, {}
    for point in entry_points(group=GROUP):
        if point.name in records:
            continue
        where = f"the entry point {point.name} = {point.value} of {GROUP}"
        try:
            framework = point.load()
        except Exception as error:
            # A broken package must not end every run on a machine that has it installed.
            reasons[point.name] = f"{where} breaks at import: {type(error).__name__}: {error}"
            continue
        if isinstance(framework, Framework) and framework.name == point.name:
            records[point.name] = framework
        else:
            reasons[point.name] = f"{where} must name a Framework of this name, not {framework!r:.100}"
    return records, reasons


def forget() -> None:
    """Read the entry points again at the next call, as packages were installed or removed."""
    _read.cache_clear()


def get(name: str) -> Framework | None:
    """The record of a framework; None where it has none, as for a package that only registers a backend."""
    return known().get(name)


def aliases() -> dict[str, str]:
    """Alias -> the framework's name."""
    return {alias: f.name for f in known().values() for alias in f.aliases}


def with_module(module: str) -> list[str]:
    """The frameworks with kernels for a module, in the order of their records."""
    return [f.name for f in known().values() if module in f.modules]


def with_rule() -> dict[str, str]:
    """Name of each framework whose releases publish a tile rule -> the module of the rule."""
    return {f.name: f.rule for f in known().values() if f.rule}


def is_unruled(name: str, module: str) -> bool:
    """Whether only a boundary can be asked of a framework's module on a GPU, as it publishes no tile rule."""
    framework = get(name)
    return framework is not None and module in framework.unruled
