"""Query tiles of attention kernels: FlashInfer's CTA_TILE_Q (FA2 kernels) and FlashAttention-2's split-KV path."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from pytest_nfp.granularity.artifacts import Artifact, open_release
from pytest_nfp.granularity.cpp import call_function, local_constant
from pytest_nfp.granularity.maps import Granularity, RuleUnknown, from_points

FLASHINFER_RULE = re.compile(r"(?:^|/)include/flashinfer/utils\.cuh$")
FLASH_ATTN_RULE = re.compile(r"^csrc/flash_attn/src/flash_fwd_launch_template\.h$")
MAX_ROWS = 4096


@lru_cache(maxsize=256)
def flashinfer(
    release: str, device_name: str, compute_capability: str, head_dim: int, dtype: str, archives: Path | None = None
) -> Granularity:
    """CTA_TILE_Q over packed query rows (positions x GQA group; FlashInfer always packs). Raises RuleUnknown."""
    artifact = _open("flashinfer-python", release, FLASHINFER_RULE, archives)
    source = artifact.read(min(artifact.names))
    major, minor = (int(part) for part in compute_capability.split("."))
    capability = {"first": major, "second": minor}
    points: list[tuple[int, str, int | None]] = []
    for rows in range(1, MAX_ROWS + 1):
        tile = call_function(
            source,
            "FA2DetermineCtaTileQ",
            {"avg_packed_qo_len": rows, "head_dim": head_dim},
            {"GetCudaComputeCapability": lambda: capability},
        )
        points.append((tile, "FA2DetermineCtaTileQ", None))
    return _map(
        "flashinfer-python",
        release,
        dtype,
        device_name,
        points,
        artifact,
        True,
        "fa2",
        "FlashInfer's FA2 kernels, named by backend='fa2'; 'auto' takes FA3 kernels on Hopper, which this rule does not describe",
    )


@lru_cache(maxsize=256)
def flash_attn(release: str, device_name: str, head_dim: int, dtype: str, archives: Path | None = None) -> Granularity:
    """KBlockM of the split-KV path, which flash_attn_with_kvcache takes over a paged cache. Raises RuleUnknown."""
    artifact = _open("flash-attn", release, FLASH_ATTN_RULE, archives)
    tile = local_constant(
        artifact.read(min(artifact.names)), "run_mha_fwd_splitkv_dispatch", "kBlockM", {"Headdim": head_dim}
    )
    points: list[tuple[int, str, int | None]] = [(tile, "run_mha_fwd_splitkv_dispatch", None)] * MAX_ROWS
    return _map(
        "flash-attn",
        release,
        dtype,
        device_name,
        points,
        artifact,
        False,
        "fa2-splitkv",
        "the KV-cache path of FlashAttention-2; GQA heads are packed at a query length of 1 alone",
    )


def _open(framework: str, release: str, wanted: re.Pattern[str], archives: Path | None) -> Artifact:
    artifact = open_release(framework, release, wanted, archives)
    if not artifact.names:
        raise RuleUnknown(f"{artifact.file} holds no file that matches {wanted.pattern}")
    return artifact


def _map(
    framework: str,
    release: str,
    dtype: str,
    device_name: str,
    points: list[tuple[int, str, int | None]],
    artifact: Artifact,
    packed: bool,
    kernel: str,
    reason: str,
) -> Granularity:
    return Granularity(
        framework=framework,
        release=release,
        module="attention",
        dtype=dtype,
        device_name=device_name,
        ranges=from_points(points),
        kernel=kernel,
        kernel_reason=reason,
        artifact_file=artifact.file,
        artifact_sha256=artifact.sha256,
        origin=artifact.origin,
        packed=packed,
    )
