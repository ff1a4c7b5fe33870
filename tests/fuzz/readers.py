"""Every reader of a file that somebody else may have written, with examples of what it reads and the errors that it may raise."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pytest_nfp import catalog, certificate, records, routing_traces
from pytest_nfp.baselines import BaselineFile
from pytest_nfp.cases import Backend, expand
from pytest_nfp.catalog import UnknownName
from pytest_nfp.compare.one_curve import judge_curve
from pytest_nfp.curves.formats import read_curve
from pytest_nfp.files import FileError, read_yaml
from pytest_nfp.granularity import RuleUnknown
from pytest_nfp.granularity.archive_members import members_of
from pytest_nfp.granularity.evaluator import Answer, _first_error
from pytest_nfp.predict import datasheet, predict_case
from pytest_nfp.predict.calibration_files import CalibrationsFile
from pytest_nfp.records import journal

PROJECT = Path(__file__).parents[2]
NOW = datetime(2026, 12, 1, tzinfo=UTC)
REFUSALS = (FileError, UnknownName, RuleUnknown, certificate.Refused)


@dataclass(frozen=True)
class Reader:
    """read: of a path; suffix: of its file. examples: what it reads well. errors: what it may raise."""

    read: Callable[[Path], object]
    suffix: str
    examples: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = REFUSALS


def _curve(path: Path) -> None:
    judge_curve(read_curve(path))


def _config(path: Path) -> None:
    """A model's config.json, and what is predicted of it."""
    model = catalog.model(str(path))
    gpu = catalog.gpu("h200")
    for module in ("dense", "moe"):
        for case in list(expand("h200", Backend("vllm", "0.24.0"), module, model))[:2]:
            predict_case(case, datasheet(gpu.peak_flops, gpu.bandwidth), None)


def _archive(path: Path) -> None:
    names, read = members_of(path, re.compile(r"\.(py|json)$"))
    for name in sorted(names)[:20]:
        read(name)


def _answer(path: Path) -> None:
    try:
        Answer.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise RuleUnknown(_first_error(error)) from error


def _wheel() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("vllm/a.py", "vllm/configs/E=8,N=16.json"):
            archive.writestr(name, "x = 1\n" * 20)
    return made.getvalue()


def _sdist() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name in ("vllm-1/a.py", "vllm-1/b.json"):
            member = tarfile.TarInfo(name)
            member.size = 6
            archive.addfile(member, io.BytesIO(b"x = 1\n"))
    return made.getvalue()


CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "decoder_sparse_step": 1, "norm_topk_prob": True, "hidden_act": "silu",
}  # fmt: skip
JOURNAL = '{"run": {"tolerance": 0.2, "seed": 0}}\n{"machine": {"gpu": "h200", "title": "x"}}\n{"update": {"backend": "vllm==1"}}\n'
RECORD = {
    "schema": 1, "tool": "pytest-nfp 0.1.0", "gpu": "h200", "started": "2026-12-01T00:00:00+00:00", "partial": False, "tolerance": 0.2,
    "match_tolerance": 0.15, "protocol": "quick", "seed": 0, "machine": {"title": "x"}, "cases": [],
}  # fmt: skip
STATEMENT = json.dumps(
    {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicateType": "x", "predicate": {}}
)
READERS = {
    "curve.csv": Reader(_curve, ".csv", (b"N,T_us\n1,100\n2,101\n4,105\n8,130\n16,250\n", b"tokens,latency_ms\n1,0.1\n2,0.1\n64,0.2\n")),
    "curve.json": Reader(
        _curve, ".json",
        (
            b'[{"N": 1, "T_us": 100}, {"N": 2, "T_us": 101}, {"N": 4, "T_us": 180}]',
            b'{"devices": [], "benchmarks": [{"name": "x", "states": [{"axis_values": [{"name": "N", "value": "1"}], "summaries": []}]}]}',
        ),
    ),
    "config.json": Reader(_config, ".json", (json.dumps(CONFIG).encode(),)),
    "trace.csv": Reader(routing_traces.read_trace, ".csv", (b"0,1,2\n1,3,4\n2,1,4\n",)),
    "baseline.yaml": Reader(
        lambda p: read_yaml(p, BaselineFile), ".yaml", ((PROJECT / "baselines/h20/vllm-0.9.1/llada-2.1-mini.yaml").read_bytes(),)
    ),
    "calibrations.yaml": Reader(
        lambda p: read_yaml(p, CalibrationsFile), ".yaml",
        ((PROJECT / "pytest_nfp/catalog/calibrations.yaml").read_bytes().partition(b"- gpu: a100\n")[0][:3000],),
    ),
    "record.json": Reader(records.read, ".json", (json.dumps(RECORD).encode(),)),
    "journal.jsonl": Reader(lambda p: journal.records_of(journal.read(p)), ".jsonl", (JOURNAL.encode(),)),
    "certificate.json": Reader(
        lambda p: certificate.verify(p, None, None, NOW), ".json",
        (STATEMENT.encode(), json.dumps({"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": "eA==", "keyid": "x"}]}).encode()),
    ),
    "release.whl": Reader(_archive, ".whl", (_wheel(),)),
    "release.tar.gz": Reader(_archive, ".tar.gz", (_sdist(),)),
    "answer": Reader(_answer, "", (b'{"number": 0, "runs": [[16, [64, null, null, ""]]]}',)),
}  # fmt: skip
