"""Which tile runs at which token count: rules of released backends as piecewise maps.

A rule comes from the installed framework, an archive, the package index, or the shipped table, in this order. What
can't be read or evaluated is unknown, with the reason, never a guess.
"""

from __future__ import annotations

from pathlib import Path

from pytest_nfp import catalog
from pytest_nfp.cases import Case
from pytest_nfp.granularity import attention, fused_moe, shipped, torch_cpu
from pytest_nfp.granularity.maps import Granularity, Range, RuleUnknown, changed_ranges

__all__ = ["Granularity", "Range", "RuleUnknown", "changed_ranges", "granularity_of", "shape_of"]


def shape_of(case: Case) -> dict[str, int]:
    """The dimensions that the rule of this case's module is asked about."""
    if case.module == "moe" and case.subject.moe is not None:
        moe = case.subject.moe
        return {
            "experts": moe.experts,
            "width": moe.width,
            "hidden": case.subject.hidden,
            "top_k": case.top_k or moe.top_k,
        }
    if case.module == "attention" and case.subject.attention is not None:
        return {"head_dim": case.subject.attention.head_dim}
    return {}


def granularity_of(case: Case, archives: Path | None = None, use_table: bool = True) -> Granularity:
    """The map that this case runs on. Raises RuleUnknown with the reason."""
    if case.backend.framework == "torch":
        if case.gpu != "cpu":
            raise RuleUnknown("torch's GPU kernels publish no tile rule")
        return torch_cpu.granularity(case.backend.release, case.module, case.kernel or "", case.dtype, "cpu")
    if case.module == "dense":
        raise RuleUnknown("a dense GEMM's tiles are chosen by the vendor's library, which publishes no rule")
    try:
        return _read(case, archives)
    except RuleUnknown as reason:
        if not use_table:
            raise
        gpu = catalog.gpu(case.gpu)
        try:
            return shipped.lookup(
                case.backend.framework,
                case.backend.release,
                case.module,
                case.dtype,
                gpu.driver_names[0],
                shape_of(case),
            )
        except RuleUnknown as also:
            raise RuleUnknown(f"{reason}; {also}") from None


def _read(case: Case, archives: Path | None) -> Granularity:
    gpu = catalog.gpu(case.gpu)
    shape = shape_of(case)
    device_name = gpu.driver_names[0]
    match case.backend.framework:
        case "vllm" | "sglang":
            return fused_moe.granularity(
                case.backend.framework,
                case.backend.release,
                fused_moe.ExpertShape(**shape),
                device_name,
                gpu.compute_capability,
                gpu.shared_memory_optin_kib * 1024,
                case.dtype,
                archives,
            )
        case "flashinfer-python":
            return attention.flashinfer(
                case.backend.release, device_name, gpu.compute_capability, shape["head_dim"], case.dtype, archives
            )
        case "flash-attn":
            return attention.flash_attn(case.backend.release, device_name, shape["head_dim"], case.dtype, archives)
        case other:
            raise RuleUnknown(f"{other} has no granularity rule here")
