"""What a device's name tells: NVIDIA's compute capability, AMD's architecture, and what is refused for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.catalog.device_names import device_by_name
from pytest_nfp.cli import main
from pytest_nfp.granularity import DeviceFacts, ExpertShape, HeadShape, Query, RuleUnknown, require_path
from tests.granularity import releases


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA L40", (8, 9)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA H200 NVL", (9, 0)),
        ("NVIDIA A800 80GB PCIe", (8, 0)),
        ("NVIDIA A100-PCIE-40GB", (8, 0)),
        ("NVIDIA A10", (8, 6)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA A2", (8, 6)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA B300 SXM6 AC", (10, 3)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA RTX A6000", (8, 6)),
        ("Quadro RTX 6000", (7, 5)),
        ("Tesla V100-SXM2-32GB", (7, 0)),
        ("Tesla T4", (7, 5)),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6)),
    ],
)
def test_a_name_tells_the_compute_capability(name: str, capability: tuple[int, int]) -> None:
    """As the vendor's list has it; brands that drivers dropped later make no other device."""
    found = device_by_name(name)
    assert found is not None
    assert (found.compute_capability, found.architecture) == (capability, "")
    assert found.shared_memory_optin is not None


def test_a_name_tells_amds_architecture_and_an_unknown_one_nothing() -> None:
    """MI300X is gfx942; a name that begins no entry is no device."""
    found = device_by_name("AMD Instinct MI300X")
    assert found is not None
    assert (found.compute_capability, found.architecture) == (None, "gfx942")
    for name in ("NVIDIA X1", "A", "", "H2000"):
        assert device_by_name(name) is None


def test_the_catalogs_own_gpus_agree_with_their_names() -> None:
    """Two tables say one thing."""
    for gpu in catalog.gpus():
        for name in gpu.driver_names:
            found = device_by_name(name)
            assert found is not None, name
            assert found.compute_capability == gpu.capability
            assert found.shared_memory_optin == gpu.shared_memory_optin_kib * 1024


EXPERTS, HEADS = ExpertShape(128, 768, 2048, 8), HeadShape(16, 4, 128)


@pytest.mark.parametrize(
    ("framework", "device", "dtype", "reason"),
    [
        ("vllm", DeviceFacts("AMD Instinct MI300X", architecture="gfx942"), "bf16", "AMD's gfx942"),
        ("vllm", DeviceFacts("Tesla V100", (7, 0)), "bf16", "does not compute in bf16, which needs 8.0"),
        ("vllm", DeviceFacts("Tesla P40", (6, 1)), "fp16", "vllm has no kernels for Tesla P40"),
        ("sglang", DeviceFacts("Tesla V100", (7, 0)), "fp16", "sglang has no kernels for Tesla V100"),
        ("flashinfer-python", DeviceFacts("Tesla V100", (7, 0)), "fp16", "it needs 7.5 or more"),
        ("flash-attn", DeviceFacts("Tesla T4", (7, 5)), "fp16", "it needs 8.0 or more"),
    ],
)
def test_a_gpu_without_a_path_is_refused(framework: str, device: DeviceFacts, dtype: str, reason: str) -> None:
    """With what it lacks; the tiles of another device's kernels are no answer."""
    shape = HEADS if framework in ("flashinfer-python", "flash-attn") else EXPERTS
    with pytest.raises(RuleUnknown, match=reason):
        require_path(Query(framework, "1", device, shape, dtype))
    require_path(Query("vllm", "1", DeviceFacts("Tesla V100", (7, 0)), EXPERTS, "fp16"))


def test_the_command_refuses_before_it_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit 2; another device's name gets its map."""
    releases.vllm(tmp_path, "98.1")
    asked = ["granularity", "vllm==98.1", "--model", "llada-2.1-mini", "--artifacts", str(tmp_path), "--device-name"]
    assert main([*asked, "AMD Instinct MI300X"]) == 2
    assert "Choose an NVIDIA GPU" in capsys.readouterr().err
    assert main([*asked, "NVIDIA H200 NVL"]) == 0
    assert "kernel   triton" in capsys.readouterr().out
