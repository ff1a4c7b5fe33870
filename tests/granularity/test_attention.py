"""Query tiles of attention frameworks, from small sources of the same shape as theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_nfp.granularity import DeviceFacts, HeadShape, Query, RuleUnknown, attention, changed_ranges, read
from pytest_nfp.principle import attention_term, attention_work, closed_form

from . import releases

H20 = DeviceFacts("NVIDIA H20", (9, 0), 227 * 1024)
L40S = DeviceFacts("NVIDIA L40S", (8, 9), 99 * 1024)
GQA = HeadShape(16, 4, 128)

OLD = """
inline uint32_t FA2DetermineCtaTileQ(int64_t rows, uint32_t head_dim);
inline uint32_t FA2DetermineCtaTileQ(int64_t avg_packed_qo_len, uint32_t head_dim) {
  if (avg_packed_qo_len > 64 && head_dim < 256) { return 128; }
  auto cc = GetCudaComputeCapability();
  if (cc.first >= 8) { return avg_packed_qo_len > 16 ? 64 : 16; }
  return 64;
}
"""
NEW = """
inline uint32_t FA2DetermineCtaTileQ(int64_t avg_packed_qo_len, uint32_t head_dim,
                                     uint32_t head_dim_qk = 0, uint32_t kv_dtype_bytes = 2) {
  const uint32_t qk = head_dim_qk ? head_dim_qk : head_dim;
  if (head_dim >= 512) { return avg_packed_qo_len <= 32 ? 16 : 32; }
  if (avg_packed_qo_len > 64 && head_dim < 256) { return 128; }
  int dev_id = 0, limit = 0;
  cudaGetDevice(&dev_id);
  cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev_id);
  if (16 * qk * 2 + (qk + head_dim) * 64 * kv_dtype_bytes > (uint32_t)limit) { return 64; }
  return avg_packed_qo_len > 16 ? 64 : 16;
}
"""
TILE_SIZE = """
constexpr std::tuple<int, int, bool, bool> tile_size_fwd_sm90(
        int headdim, int headdim_v, bool is_causal, bool is_local, int element_size = 2, bool v_colmajor = false) {
    if (element_size == 2) {
        if (headdim <= 96) { return {192, is_local || is_causal ? 128 : 144, false, true}; }
        else { return {128, 176, true, true}; }
    } else {
        return {headdim <= 64 ? 192 : 128, 160, true, true};
    }
}
"""
CUTE = """
from dataclasses import dataclass


@dataclass(frozen=True)
class FwdConfig:
    m_block_size: int
    n_block_size: int
    q_stage: int = 1


def _get_fwd_config(
    *, arch, head_dim, head_dim_v, max_seqlen_q, max_seqlen_k, pack_gqa, qhead_per_kvhead, batch_size, num_head_kv,
    causal, local, num_splits,
):
    cfg = FwdConfig(128, 128)
    if arch // 10 == 9 and head_dim <= 64:
        cfg = FwdConfig(192, 128)
    rows = max_seqlen_q * (qhead_per_kvhead if pack_gqa else 1)
    stage = 2 if arch // 10 == 10 and rows > cfg.m_block_size else 1
    return FwdConfig(cfg.m_block_size, 128, stage)
"""


CHOICE = """
from enum import Enum
from typing import Optional


class PosEncodingMode(Enum):
    NONE = 0
    ROPE_LLAMA = 1


def get_compute_capability(device):
    return device.index.reaches.elsewhere


def is_fa3_supported(device) -> bool:
    major, _ = get_compute_capability(device)
    return major == 9 and version_at_least(torch.version.cuda, "12.3")


def determine_attention_backend(
    device, pos_encoding_mode, use_fp16, use_custom_mask, dtype_q, dtype_kv, *, head_dim_qk: Optional[int] = None
) -> str:
    if pos_encoding_mode != PosEncodingMode.NONE.value or use_custom_mask:
        return "fa2"
    if dtype_q in (torch.float8_e4m3fn,) or (head_dim_qk or 0) > 256:
        return "fa2"
    return "fa3" if is_fa3_supported(device) else "fa2"
"""
MLA = """
template <typename IdType>
inline cudaError_t MLAPlan(void* buffer, uint32_t batch_size) {
  int cluster_size;
  if (avg_packed_qo_len > 64) {
    cluster_size = 2;  // two blocks in a cluster
  } else {
    cluster_size = 1;
  }
  const int cta_tile_q = 64;
  return cudaSuccess;
}
"""


def flashinfer(folder: Path, text: str, version: str = "99.1", choice: str = CHOICE) -> None:
    files = {"include/flashinfer/utils.cuh": text, "include/flashinfer/attention/scheduler.cuh": MLA}
    releases.wheel(
        folder,
        "flashinfer_python",
        version,
        {f"flashinfer/data/{n}": t for n, t in files.items()} | {"flashinfer/utils.py": choice},
    )


def tiles(
    folder: Path, framework: str, shape: HeadShape = GQA, device: DeviceFacts = H20, **asked: Any
) -> list[list[int]]:
    return read(Query(framework, "99.1", device, shape, **asked), folder).tiles()


@pytest.mark.parametrize("text", [OLD, NEW])
def test_flashinfer_selects_by_packed_rows_whatever_the_number_of_parameters(tmp_path: Path, text: str) -> None:
    """Two parameters or four, with defaults, out-parameters and casts: 16, 64, 128."""
    flashinfer(tmp_path, text)
    assert tiles(tmp_path, "flashinfer-python") == [[1, 16, 16], [17, 64, 64], [65, 4096, 128]]


def test_a_head_dimension_of_512_changed_and_others_did_not(tmp_path: Path) -> None:
    """0.6.10 to 0.6.18: 512 changed; 64, 128 and 256 did not."""
    before, after = tmp_path / "a", tmp_path / "b"
    for folder, text in ((before, OLD), (after, NEW)):
        folder.mkdir()
        flashinfer(folder, text)
    same = {
        d: tiles(before, "flashinfer-python", HeadShape(8, 8, d))
        == tiles(after, "flashinfer-python", HeadShape(8, 8, d))
        for d in (64, 128, 256, 512)
    }
    assert same == {64: True, 128: True, 256: True, 512: False}


def test_shared_memory_decides_where_the_rule_asks_for_it(tmp_path: Path) -> None:
    """A part with 99 KiB can't hold the step that one with 227 KiB can."""
    flashinfer(tmp_path, NEW)
    wide = HeadShape(8, 8, 448)
    assert tiles(tmp_path, "flashinfer-python", wide)[0] == [1, 16, 16]
    assert tiles(tmp_path, "flashinfer-python", wide, L40S)[0][2] == 64
    with pytest.raises(RuleUnknown, match="asks for the shared memory of NVIDIA X"):
        tiles(tmp_path, "flashinfer-python", wide, DeviceFacts("NVIDIA X", (9, 0)))


def test_cuda_graphs_feed_the_maximum_not_the_average(tmp_path: Path) -> None:
    """Batch 8, 4 positions, group 4, head_dim 128: tile 16 in eager mode, 128 under graphs."""
    flashinfer(tmp_path, OLD)
    for mode, tile in (("eager", 16), ("graph", 128)):
        g = read(Query("flashinfer-python", "99.1", H20, GQA, mode=mode, batch=8), tmp_path)  # type: ignore[arg-type]
        assert g.tile(4 * GQA.group) == tile
    assert attention.selector_rows(4, Query("flashinfer-python", "1", H20, GQA, mode="graph", batch=1)) == 4


def test_a_device_that_the_catalog_lacks_is_unknown_where_the_rule_asks(tmp_path: Path) -> None:
    """Never a guess."""
    flashinfer(tmp_path, OLD)
    with pytest.raises(RuleUnknown, match="asks for the compute capability of NVIDIA X"):
        tiles(tmp_path, "flashinfer-python", device=DeviceFacts("NVIDIA X"))


def test_flash_attn_2_reads_the_split_path(tmp_path: Path) -> None:
    """kBlockM of run_mha_fwd_splitkv_dispatch, whatever else the file holds."""
    text = "template<typename T, int Headdim> void run_mha_fwd_splitkv_dispatch(P &p) { constexpr static int kBlockM = 64; go<kBlockM>(p); }"
    releases.sdist(tmp_path, "flash_attn", "99.1", {"csrc/flash_attn/src/flash_fwd_launch_template.h": text})
    assert tiles(tmp_path, "flash-attn") == [[1, 4096, 64]]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "device", "tile", "packed"),
    [
        (64, "bf16", H20, 192, True),
        (128, "bf16", H20, 128, True),
        (128, "fp8", H20, 128, True),
        (96, "fp8", H20, 192, True),
        (128, "bf16", L40S, 128, True),
    ],
)
def test_flash_attn_3_recorded_table(head_dim: int, dtype: str, device: DeviceFacts, tile: int, packed: bool) -> None:
    """kBlockM by head dimension and width, as recorded with its commit; GQA is packed where that fills the tile."""
    g = read(Query("flash-attn-3", "0", device, HeadShape(16, 4, head_dim), dtype))
    assert (g.tile(1), g.packed, g.origin) == (tile, packed, "recorded rule")
    assert "0251105" in g.artifact_file
    with pytest.raises(RuleUnknown, match="not for sm100"):
        read(Query("flash-attn-3", "0", DeviceFacts("NVIDIA B200", (10, 0)), GQA))


def test_flash_attn_3_from_a_source_tree(tmp_path: Path) -> None:
    """A tuple in braces with conditions in it; 16-bit and 8-bit."""
    (tmp_path / "hopper").mkdir()
    (tmp_path / "hopper" / "tile_size.h").write_text(TILE_SIZE, encoding="utf-8")
    for head_dim, dtype, tile in ((96, "bf16", 192), (128, "bf16", 128), (64, "fp8", 192), (96, "fp8", 128)):
        g = read(Query("flash-attn-3", "0", H20, HeadShape(8, 8, head_dim), dtype), source=tmp_path)
        assert (g.tile(1), g.origin, g.packed) == (tile, "source tree", False)
    with pytest.raises(RuleUnknown, match="--source takes the root"):
        read(Query("flash-attn-3", "0", H20, GQA), source=tmp_path / "nowhere")


def test_flash_attn_4_counts_its_stages(tmp_path: Path) -> None:
    """On Blackwell two stages make 256 rows past the first 128; on Hopper the head dimension decides."""
    releases.wheel(tmp_path, "flash_attn_4", "99.1", {"flash_attn/cute/interface.py": CUTE})
    b200 = DeviceFacts("NVIDIA B200", (10, 0), 1)
    assert tiles(tmp_path, "flash-attn-4", device=b200) == [[1, 128, 128], [129, 4096, 256]]
    assert tiles(tmp_path, "flash-attn-4", HeadShape(8, 8, 64)) == [[1, 4096, 192]]
    releases.wheel(tmp_path, "flash_attn_4", "99.2", {"flash_attn/cute/interface.py": "x = 1\n"})
    with pytest.raises(RuleUnknown, match="there is no function to evaluate"):
        read(Query("flash-attn-4", "99.2", H20, GQA), tmp_path)


@pytest.mark.network
@pytest.mark.parametrize(
    ("framework", "release", "shape", "tiles_expected"),
    [
        ("flashinfer-python", "0.2.5", GQA, [[1, 16, 16], [17, 64, 64], [65, 4096, 128]]),
        ("flashinfer-python", "0.6.10", HeadShape(8, 1, 512), [[1, 16, 16], [17, 4096, 64]]),
        ("flashinfer-python", "0.6.18", HeadShape(8, 1, 512), [[1, 32, 16], [33, 4096, 32]]),
        ("flashinfer-python", "0.7.4", GQA, [[1, 16, 16], [17, 64, 64], [65, 4096, 128]]),
        ("flash-attn", "2.5.9.post1", GQA, [[1, 4096, 64]]),
        ("flash-attn-4", "4.0.0b36", GQA, [[1, 4096, 128]]),
    ],
)
def test_real_releases(framework: str, release: str, shape: HeadShape, tiles_expected: list[list[int]]) -> None:
    """From the index, over the years of a framework."""
    assert read(Query(framework, release, H20, shape)).tiles() == tiles_expected


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "kernel"),
    [
        (H20, GQA, "bf16", "fa3"),
        (H20, GQA, "fp8", "fa2"),
        (H20, HeadShape(16, 4, 512), "bf16", "fa2"),
        (L40S, GQA, "bf16", "fa2"),
    ],
)
def test_flashinfers_own_choice_names_the_kernel(
    tmp_path: Path, device: DeviceFacts, shape: HeadShape, dtype: str, kernel: str
) -> None:
    """backend='auto' by device, dtype and head dimension; where it is not FA2 the tiles are said to be another's."""
    flashinfer(tmp_path, NEW)
    g = read(Query("flashinfer-python", "99.1", device, shape, dtype), tmp_path)
    assert g.kernel == kernel
    assert any("backend='auto' gives fa3" in w for w in g.warnings) == (kernel == "fa3")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("x = 1\n", "the source has no function determine_attention_backend"),
        (CHOICE.replace('"fa3" if', '"fa3" if elsewhere() and'), "calls elsewhere, for which there is no stub"),
        (CHOICE.replace('return "fa3" if', "return 3 if"), "returned 3, not the name of a backend"),
    ],
)
def test_a_choice_that_can_not_be_evaluated_is_unknown(tmp_path: Path, choice: str, reason: str) -> None:
    """The tiles of FA2 stand, and the kernel is not guessed."""
    flashinfer(tmp_path, NEW, choice=choice)
    g = read(Query("flashinfer-python", "99.1", H20, GQA), tmp_path)
    assert g.kernel == "unknown"
    assert reason in g.kernel_reason
    assert g.tile(1) == 16


def test_mla_rows_share_a_tile_of_64_however_few_they_are(tmp_path: Path) -> None:
    """Eight heads of a rank at one position are 8 rows of 64: eight positions fill the tile, and the ninth takes two blocks."""
    flashinfer(tmp_path, NEW)
    mla = HeadShape(8, 1, 576, 512)
    g = read(Query("flashinfer-python", "99.1", H20, mla), tmp_path)
    assert (g.packed, g.kernel) == (True, "mla")
    assert g.tiles() == [[1, 64, 64], [65, 4096, 128]]
    assert attention_term(g.tile(mla.group), mla.group) == 8
    one, eight = (attention_work(n, 1, 4096, 8, 1, 576, 2.0, g.tile, True).flops for n in (1, 8))
    assert one == eight


OLD_MLA_TILE = TILE_SIZE.replace(
    "if (headdim <= 96)", "if (headdim_v == 512) { return {128, 80, false, true}; } else if (headdim <= 96)"
)
NEW_MLA_TILE = OLD_MLA_TILE.replace("{128, 80,", "{64, 64,")


def test_a_change_of_the_mla_tile_between_two_source_trees_is_found(tmp_path: Path) -> None:
    """kBlockM 128 to 64 where values are 512 wide; another value width keeps its tile, and the recorded table agrees with the newer tree."""
    mla = HeadShape(8, 1, 64, 512)
    found = []
    for name, text in (("old", OLD_MLA_TILE), ("new", NEW_MLA_TILE)):
        (tmp_path / name / "hopper").mkdir(parents=True)
        (tmp_path / name / "hopper" / "tile_size.h").write_text(text)
        found.append(
            [read(Query("flash-attn-3", "0", H20, s), source=tmp_path / name) for s in (mla, HeadShape(8, 1, 64))]
        )
    (old, plain), (new, plain_too) = found
    assert changed_ranges(old.tiles(), new.tiles()) == [(1, 4096, 128, 64)]
    assert plain.tiles() == plain_too.tiles() == [[1, 4096, 192]]
    assert read(Query("flash-attn-3", "0", H20, mla)).tiles() == new.tiles()


def test_free_attention_is_not_claimed_for_the_model() -> None:
    """Eight positions that are free in MLA say nothing of a model whose experts leave at two."""
    assert closed_form(attention=attention_term(64, 8), moe=2).n_max == 2


def test_flash_attn_2_has_no_values_of_another_width(tmp_path: Path) -> None:
    """Unknown, with the reason."""
    releases.sdist(tmp_path, "flash_attn", "99.1", {"csrc/flash_attn/src/flash_fwd_launch_template.h": "// nothing"})
    with pytest.raises(RuleUnknown, match="values of the keys' width alone"):
        read(Query("flash-attn", "99.1", H20, HeadShape(8, 1, 64, 512)), tmp_path)


@pytest.mark.network
@pytest.mark.parametrize("release", ["0.2.5", "0.5.3", "0.6.10", "0.7.4"])
def test_the_choice_and_the_mla_plan_of_real_releases(release: str) -> None:
    """FA3 on Hopper, FA2 elsewhere; 64 rows a block, two blocks past 64 packed rows."""
    for device, kernel in ((H20, "fa3"), (L40S, "fa2")):
        assert read(Query("flashinfer-python", release, device, GQA)).kernel == kernel
    mla = read(Query("flashinfer-python", release, H20, HeadShape(16, 1, 576, 512)))
    assert mla.tiles() == [[1, 64, 64], [65, 4096, 128]]
