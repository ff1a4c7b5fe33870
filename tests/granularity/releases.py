"""Small releases of our own, with rules of the shape that the frameworks' have: for tests without the index."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

VLLM_RULE = """
import functools, json, os
import somewhere.envs as envs
from somewhere.platforms import current_platform

LIMITS = ((32, 16), (96, 32))


def get_config_file_name(E, N, dtype, block_shape=None):
    name = current_platform.get_device_name().replace(" ", "_")
    return f"E={E},N={N},device_name={name}.json"


@functools.lru_cache
def get_moe_configs(E, N, dtype, block_n=None, block_k=None):
    path = os.path.join(os.path.dirname(os.path.realpath(__file__)), "configs", get_config_file_name(E, N, dtype))
    if os.path.exists(path):
        with open(path) as f:
            data = json.load(f)
            data.pop("triton_version", None)
            return {int(k): v for k, v in data.items()}
    return None


def get_default_config(M: int, E: int, N: int, K: int, topk: int, dtype: "str | None", block_shape=None) -> dict:
    if envs.VLLM_BATCH_INVARIANT:
        return {"BLOCK_SIZE_M": 64}
    for limit, tile in LIMITS:
        if M <= limit:
            return {"BLOCK_SIZE_M": tile}
    return {"BLOCK_SIZE_M": 64}


def try_get_optimal_moe_config(w1_shape, w2_shape, top_k, dtype, M, block_shape=None):
    from somewhere.fused_moe import get_config

    if get_config():
        return get_config()
    E, _, N = w2_shape
    configs = get_moe_configs(E, N, dtype)
    if configs:
        return configs[min(configs.keys(), key=lambda x: abs(x - M))]
    return get_default_config(M, E, N, w1_shape[2], top_k, dtype, block_shape)
"""

SGLANG_RULE = """
import functools, json, os
import triton
from somewhere import get_device_name, get_global_server_args


@functools.lru_cache
def get_moe_configs(E, N, dtype):
    if get_global_server_args().enable_deterministic_inference:
        return None
    root = os.path.join(os.environ.get("SGLANG_MOE_CONFIG_DIR", os.path.dirname(os.path.realpath(__file__))), "configs")
    name = f"E={E},N={N},device_name={get_device_name().replace(' ', '_')}.json"
    folders = sorted(
        (d for d in os.listdir(root) if d.startswith("triton_")),
        key=lambda d: tuple(int(x) for x in d.removeprefix("triton_").split("_")),
        reverse=True,
    )
    for folder in [f"triton_{triton.__version__.replace('.', '_')}", *folders]:
        path = os.path.join(root, folder, name)
        if os.path.exists(path):
            with open(path) as f:
                return {int(k): v for k, v in json.load(f).items()}
    return None


def try_get_optimal_moe_config(w1_shape, w2_shape, top_k, dtype, M, is_marlin=False, block_shape=None):
    E, _, N = w2_shape
    configs = get_moe_configs(E, N, dtype)
    if configs:
        return configs[min(configs.keys(), key=lambda x: abs(x - M))]
    return {"BLOCK_SIZE_M": 16 if M <= E else 64}
"""

VLLM_FOLDER = "vllm/model_executor/layers/fused_moe"
SGLANG_FOLDER = "sglang/srt/layers/moe/moe_runner/triton_utils"


def tuned(**tiles: int) -> str:
    """A tuned file: m96=16 is key 96 with 16 rows."""
    return json.dumps({"triton_version": "3.5.1"} | {k[1:]: {"BLOCK_SIZE_M": t} for k, t in tiles.items()})


def sdist(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A source archive."""
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member, text in files.items():
            data = text.encode()
            info = tarfile.TarInfo(f"{name}-{version}/{member}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A wheel."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for member, text in files.items():
            z.writestr(member, text)
    return path


def variant(tile: int, **parameters: int) -> str:
    """The rule with one tile throughout, and other parameters beside it."""
    config = {"BLOCK_SIZE_M": tile} | parameters
    return VLLM_RULE.replace("    for limit, tile in LIMITS:", f"    return {config}\n    for limit, tile in LIMITS:")


def vllm(folder: Path, version: str, rule: str = VLLM_RULE, more: dict[str, str] | None = None, **configs: str) -> Path:
    """A vLLM of our own, that runs Triton's experts; configs are tuned files by device name, more are other files."""
    files = {f"{VLLM_FOLDER}/fused_moe.py": rule, f"{VLLM_FOLDER}/layer.py": "", "vllm/envs.py": ""} | (more or {})
    files |= {f"{VLLM_FOLDER}/configs/E=256,N=512,device_name={d}.json": text for d, text in configs.items()}
    return sdist(folder, "vllm", version, files)
