"""Query tiles of attention kernels, from the rules of their releases.

FlashInfer: CTA_TILE_Q of its FA2 kernels. FlashAttention-2: kBlockM of the split-KV path. FlashAttention-4: the tile
and stages of its forward configuration. FlashAttention-3: tile_size.h of a source tree, or else the recorded table.

Maps count the query rows of one request. Where the kernel packs the heads into the tile, the count is multiplied by the
GQA group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp.granularity import evaluator
from pytest_nfp.granularity.artifacts import Artifact
from pytest_nfp.granularity.cpp import Reference, branch_value, call_function, local_constant
from pytest_nfp.granularity.maps import UNKNOWN, Granularity, RuleUnknown, from_points
from pytest_nfp.granularity.query import HeadShape, Query
from pytest_nfp.granularity.release import opened

KV_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp8-block": 1}
MLA_LATENT = 512
"""Value width in the decode form of MLA models: the latent that all heads share."""
CONTEXT = 4096
"""Cached tokens that FlashAttention-4's configuration is asked with. They decide splits and key tiles, not the query
tile."""

FLASH_ATTN_3 = "flash-attention commit 0251105 (2026-08-15), hopper/tile_size.h and hopper/heuristics.h"
FLASH_ATTN_3_16BIT = ((64, 192), (96, 192), (128, 128), (192, 128), (256, 128))
"""(largest head_dim, kBlockM) for elements of 2 bytes."""
FLASH_ATTN_3_MLA = {512: 64, 256: 128}
"""kBlockM by value width, where head_dim is at most 64."""
FLASH_ATTN_3_8BIT = ((64, 192), (96, 192), (256, 128))
"""(largest head_dim, kBlockM) for elements of 1 byte."""


def granularity(query: Query, archives: Path | None = None, source: Path | None = None) -> Granularity:
    """The map of an attention framework. Raises RuleUnknown with the reason."""
    match query.framework:
        case "flashinfer-python":
            return _flashinfer(query, _opened(query, archives))
        case "flash-attn":
            return _flash_attn_2(query, _opened(query, archives))
        case "flash-attn-3":
            return _flash_attn_3(query, source)
        case "flash-attn-4":
            return _flash_attn_4(query, _opened(query, archives))
        case other:
            raise RuleUnknown(f"{other} has no attention rule here")


def granularities(queries: Sequence[Query], archives: Path | None = None) -> list[Granularity | RuleUnknown]:
    """For each query its map, or the reason why the map is unknown."""

    def one(query: Query) -> Granularity | RuleUnknown:
        try:
            return granularity(query, archives)
        except RuleUnknown as reason:
            return reason

    return [one(query) for query in queries]


def selector_rows(rows: int, query: Query) -> int:
    """The row count that FlashInfer's selector gets for `rows` packed rows of each request.

    Eager mode: the batch average, which is `rows`. CUDA-graph mode: the maximum that the plan must hold, (total rows -
    batch + 1) * group.
    """
    group = _heads(query).group
    if query.mode == "eager":
        return rows
    return (query.batch * (rows // group) - query.batch + 1) * group if rows >= group else rows


@lru_cache(maxsize=512)
def _flashinfer(query: Query, artifact: Artifact) -> Granularity:
    shape, capability = _heads(query), _capability(query)
    if shape.values == MLA_LATENT != shape.head_dim:
        return _flashinfer_mla(query, artifact)
    source = _member(artifact, "include/flashinfer/utils.cuh")

    def shared_memory(target: Reference, *rest: Any) -> None:
        if query.device.shared_memory_optin is None:
            raise RuleUnknown(
                f"the rule asks for the shared memory of {query.device.name}, which the catalog does not know"
            )
        target.set(query.device.shared_memory_optin)

    calls: dict[str, Callable[..., Any]] = {
        "GetCudaComputeCapability": lambda: {"first": capability[0], "second": capability[1]},
        "cudaGetDevice": lambda target: target.set(0),
        "cudaDeviceGetAttribute": shared_memory,
    }
    tiles: dict[int, int] = {}

    def tile(rows: int) -> int:
        if rows not in tiles:
            arguments = {
                "avg_packed_qo_len": rows,
                "head_dim": shape.values,
                "head_dim_qk": shape.head_dim,
                "kv_dtype_bytes": _kv_bytes(query),
                "cudaDevAttrMaxSharedMemoryPerBlockOptin": 97,
            }
            tiles[rows] = call_function(source, "FA2DetermineCtaTileQ", arguments, calls)
        return tiles[rows]

    points = [
        (tile(selector_rows(rows, query)), "FA2DetermineCtaTileQ", None) for rows in range(1, query.max_count + 1)
    ]
    kernel, reason = flashinfer_backend(query, artifact)
    warnings = []
    if kernel != "fa2":
        warnings.append(
            f"the tiles are those of backend='fa2'; backend='auto' gives {kernel}, which they do not describe"
        )
    return _map(query, points, artifact, True, kernel, reason, warnings)


def flashinfer_backend(query: Query, artifact: Artifact) -> tuple[str, str]:
    """(kernel, reason) of the prefill wrappers with backend='auto', by the release's own choice.

    The kernel is `unknown` if the choice can't be evaluated.
    """
    shape = _heads(query)
    entry = "determine_attention_backend"
    try:
        source = _member(artifact, "flashinfer/utils.py")
    except RuleUnknown as reason:
        return UNKNOWN, str(reason)
    dtype = "float8_e4m3fn" if query.dtype.startswith("fp8") else "float16" if query.dtype == "fp16" else "bfloat16"
    question: dict[str, Any] = {
        "attention_backend": entry,
        "origin": artifact.origin,
        "source": source,
        "file": "flashinfer/utils.py",
        "dtype": dtype,
        "head_dims": [shape.head_dim, shape.values],
        **evaluator.surroundings(query.device),
    }
    backend = evaluator.evaluate_attention_backend(question)
    if isinstance(backend, RuleUnknown):
        return UNKNOWN, str(backend)
    return (
        backend,
        f"{entry} of the release, for backend='auto' of the prefill wrappers without a custom mask, CUDA 12.8 or newer",
    )


def _flashinfer_mla(query: Query, artifact: Artifact) -> Granularity:
    """The map of FlashInfer's MLA kernels.

    The rows of all heads share a tile. Where they fill it, a cluster of two blocks takes over.
    """
    source = _member(artifact, "include/flashinfer/attention/scheduler.cuh")
    plan = "MLAPlan"
    rows_of_a_block = local_constant(source, plan, "cta_tile_q", {})

    def tile(rows: int) -> int:
        blocks: int = branch_value(source, plan, "cluster_size", {"avg_packed_qo_len": rows})
        return blocks * int(rows_of_a_block)

    tiles: dict[int, int] = {}
    points = []
    for rows in range(1, query.max_count + 1):
        selected_rows = selector_rows(rows, query)
        tiles[selected_rows] = tiles.get(selected_rows) or tile(selected_rows)
        points.append((tiles[selected_rows], plan, None))
    return _map(query, points, artifact, True, "mla", "FlashInfer's MLA wrapper: the heads of a rank are packed")


@lru_cache(maxsize=512)
def _flash_attn_2(query: Query, artifact: Artifact) -> Granularity:
    function = "run_mha_fwd_splitkv_dispatch"
    if _heads(query).values != _heads(query).head_dim:
        raise RuleUnknown("FlashAttention-2 takes values of the keys' width alone")
    tile = local_constant(artifact.read(min(artifact.names)), function, "kBlockM", {"Headdim": _heads(query).head_dim})
    reason = "the KV-cache path of FlashAttention-2; GQA heads are packed at a query length of 1 alone"
    points = [(tile, function, None)] * query.max_count
    return _map(query, points, artifact, False, "fa2-splitkv", reason)


@lru_cache(maxsize=512)
def _flash_attn_4(query: Query, artifact: Artifact) -> Granularity:
    shape, capability = _heads(query), _capability(query)
    name = min(artifact.names)
    source = artifact.read(name)
    if "def _get_fwd_config(" not in source:
        raise RuleUnknown(f"{artifact.file} chooses its tile inside the forward call: there is no function to evaluate")
    # The heads are packed: the kernel sees one head of `rows` positions for each KV head.
    arguments = {
        "arch": capability[0] * 10 + capability[1],
        "head_dim": shape.head_dim,
        "head_dim_v": shape.values,
        "max_seqlen_k": CONTEXT,
        "num_head_kv": shape.kv_heads,
        "qhead_per_kvhead": 1,
        "pack_gqa": False,
        "batch_size": query.batch,
        "causal": True,
        "local": False,
        "window_size_left": None,
        "window_size_right": None,
        "num_splits": 1,
        "device": None,
    }
    question = evaluator.question(
        query, artifact.origin, source, name, "_get_fwd_config", arguments, "max_seqlen_q", ["m_block_size", "q_stage"]
    )
    runs = evaluator.evaluate([question])[0]
    if isinstance(runs, RuleUnknown):
        raise runs
    packed = shape.group > 1
    points = [(tile, "_get_fwd_config", None) for count, (tile, _, _, _) in runs for _ in range(count)]
    reason = "FlashAttention-4's forward; GQA heads are packed unless the caller says otherwise"
    return _map(query, points, artifact, packed, "fa4", reason)


def _flash_attn_3(query: Query, source: Path | None) -> Granularity:
    shape, capability = _heads(query), _capability(query)
    is_hopper = capability[0] == 9
    if capability[0] not in (8, 9):
        raise RuleUnknown(f"FlashAttention-3 has kernels for sm8x and sm90, not for sm{capability[0]}{capability[1]}")
    bytes_per_element = _kv_bytes(query)
    if source is None:
        sizes = FLASH_ATTN_3_16BIT if bytes_per_element == 2 else FLASH_ATTN_3_8BIT
        tile = next((m for limit, m in sizes if shape.head_dim <= limit), None) if is_hopper else 128
        if is_hopper and bytes_per_element == 2 and shape.head_dim <= 64:
            tile = FLASH_ATTN_3_MLA.get(shape.values, tile)
        if tile is None:
            raise RuleUnknown(f"the recorded table of FlashAttention-3 ends at head_dim 256, not {shape.head_dim}")
        artifact = Artifact(FLASH_ATTN_3, "", "recorded rule", frozenset(), lambda name: "")
    else:
        path = source / "hopper" / "tile_size.h"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise RuleUnknown(
                f"{path} can't be read: {error}; --source takes the root of a flash-attention tree"
            ) from error
        arguments = {
            "headdim": shape.head_dim,
            "headdim_v": shape.values,
            "is_causal": True,
            "is_local": False,
            "element_size": bytes_per_element,
            "v_colmajor": False,
            "paged_kv": False,
            "paged_kv_non_TMA": False,
            "softcap": False,
            "use_one_mma_wg": False,
            "sm86_or_89": capability[1] != 0,
            "varlen_and_split": False,
            "append_kv": False,
        }
        name = "tile_size_fwd_sm90" if is_hopper else "tile_size_fwd_sm8x"
        returned = call_function(text, name, arguments, {})
        if not isinstance(returned, list) or not isinstance(returned[0], int):
            raise RuleUnknown(f"{path}: {name} returns {returned!r}, not a list that begins with kBlockM")
        tile = returned[0]
        artifact = Artifact(
            str(path), hashlib.sha256(text.encode()).hexdigest(), "source tree", frozenset(), lambda _: text
        )
    packed, why = _packs_gqa(query, tile, is_hopper)
    points = [(tile, "tile_size.h", None)] * query.max_count
    return _map(query, points, artifact, packed, "fa3", f"FlashAttention-3's forward; {why}")


def _packs_gqa(query: Query, tile: int, is_hopper: bool) -> tuple[bool, str]:
    """Whether FlashAttention-3 packs the GQA heads at the first position, and why.

    Heads share a tile where that fills the tile better.
    """
    group = _heads(query).group
    if group == 1:
        return False, "MHA has no heads to pack"
    if not is_hopper:
        return True, "GQA heads are always packed on sm8x"
    unpacked_share, packed_share = 1 / tile, group / (-(-group // tile) * tile)
    if unpacked_share < 0.9 * packed_share:
        return True, "GQA heads are packed: without it less than 0.9 of the share of useful rows is reached"
    return False, "GQA heads are not packed: the tile is full without it"


def _capability(query: Query) -> tuple[int, int]:
    """The compute capability of the query's device. Raises RuleUnknown if the catalog does not know it."""
    if query.device.compute_capability is None:
        raise RuleUnknown(
            f"the rule asks for the compute capability of {query.device.name}, which the catalog does not know"
        )
    return query.device.compute_capability


def _kv_bytes(query: Query) -> int:
    """Bytes of a cached element. Raises RuleUnknown for a dtype that is not in KV_BYTES."""
    if query.dtype not in KV_BYTES:
        raise RuleUnknown(f"attention rules are read for {', '.join(KV_BYTES)}, not for {query.dtype}")
    return KV_BYTES[query.dtype]


def _heads(query: Query) -> HeadShape:
    assert isinstance(query.shape, HeadShape)
    return query.shape


def _member(artifact: Artifact, ending: str) -> str:
    """The text of the release's file with this name. Raises RuleUnknown if the release has no such file."""
    for name in sorted(artifact.names):
        if name == ending or name.endswith("/" + ending):
            return artifact.read(name)
    raise RuleUnknown(f"{artifact.file} holds no {ending}")


def _opened(query: Query, archives: Path | None) -> Artifact:
    return opened(query.framework, query.release, archives)


def _map(
    query: Query,
    points: Sequence[tuple[int, str, int | None]],
    artifact: Artifact,
    packed: bool,
    kernel: str,
    reason: str,
    warnings: list[str] | None = None,
) -> Granularity:
    return Granularity(
        framework=query.framework,
        release=query.release,
        module="attention",
        dtype=query.dtype,
        device_name=query.device.name,
        ranges=from_points(points),
        kernel=kernel,
        kernel_reason=reason,
        artifact_file=artifact.file,
        artifact_sha256=artifact.sha256,
        origin=artifact.origin,
        packed=packed,
        warnings=tuple(warnings or ()),
    )
