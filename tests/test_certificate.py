"""Certificates: what is certified, what is not, and that nothing that was changed, foreign or old is believed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_nfp import certificate, records
from pytest_nfp.certificate import Refused
from pytest_nfp.cli import main
from pytest_nfp.files import FileError
from pytest_nfp.records import CaseRecord, TestResult

from .report.made import case, record

pytest.importorskip("securesystemslib")

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def measured(name: str = "a", **changed: object) -> CaseRecord:
    told: dict[str, object] = {
        "kind": "measured", "timer": "cuda-graph", "kernel": "fused_moe", "modes": {32: "graph"},
        "tests": {"boundary": TestResult(outcome="PASS", held_to=["prediction"])}, "measured_at": NOW.isoformat(),
    }  # fmt: skip
    return case(name, **told | changed)


def key(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """A private key that its owner alone can read, and its public one."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    own, public = folder / f"{name}.pem", folder / f"{name}.pub"
    own.write_bytes(private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    own.chmod(0o600)
    public.write_bytes(private.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return own, public


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A signed certificate, and the public key."""
    folder = tmp_path_factory.mktemp("certificate")
    own, public = key(folder)
    cases = [measured(), case("b", tests={"boundary": TestResult(outcome="PASS")}), measured("c", outcome="UNDECIDED")]
    records.write(folder / "record.json", record(*cases))
    certificate.write(folder / "record.json", folder, own.read_bytes(), NOW)
    return folder / "certificate.json", public


def test_what_was_measured_and_passed_is_certified_and_nothing_else(made: tuple[Path, Path]) -> None:
    """An in-toto Statement over the record's sha256; the recorded and the open case are named as not certified, with why."""
    path, public = made
    statement, is_signed = certificate.verify(path, None, public, NOW)
    assert is_signed
    digest = hashlib.sha256((path.parent / "record.json").read_bytes()).hexdigest()
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["subject"] == [{"name": "record.json", "digest": {"sha256": digest}}]
    predicate = statement["predicate"]
    assert (predicate["result"], predicate["passedTests"]) == ("WARNED", ["h200-vllm==1-a"])
    assert predicate["nfp"]["notCertified"] == {
        "h200-vllm==1-b": "recorded, not measured in this run", "h200-vllm==1-c": "UNDECIDED",
    }  # fmt: skip
    (claim,) = predicate["nfp"]["certified"]
    assert (claim["nMax"], claim["interval"], claim["graphModes"], claim["timer"]) == (
        512,
        [512, 767],
        ["graph"],
        "cuda-graph",
    )
    assert predicate["nfp"]["machine"] == {"gpu": "NVIDIA H200", "driver": "570.1"}
    assert predicate["configuration"][0]["annotations"]["tolerance"] == 0.2


def test_its_page_says_what_is_signed(made: tuple[Path, Path]) -> None:
    """The result, each certified case, what is not certified, until when and on what it holds, the key."""
    path, _ = made
    page = (path.parent / "certificate.html").read_text(encoding="utf-8")
    for said in (
        "h200: WARNED. 1 of 3 cases are certified",
        "fused_moe",
        "570.1",
        "2026-11-28",
        "recorded, not measured",
        "Signed by the key",
    ):
        assert said in page


def changed(made: tuple[Path, Path], folder: Path, change: Callable[[dict[str, Any]], object], **signed: Any) -> Path:
    """The certificate with its Statement changed, signed anew by the key given."""
    envelope = json.loads(made[0].read_text(encoding="utf-8"))
    statement = json.loads(base64.b64decode(envelope["payload"]))
    change(statement)
    library = certificate._library()
    new = library.Envelope(certificate._canonical(statement), signed.get("kind", certificate.PAYLOAD), {})
    if own := signed.get("own"):
        new.sign(certificate._signer(own.read_bytes()))
    (folder / "certificate.json").write_text(certificate._text(new), encoding="utf-8")
    (folder / "record.json").write_bytes((made[0].parent / "record.json").read_bytes())
    return folder / "certificate.json"


def claim_more(statement: dict[str, Any]) -> None:
    """Call the recorded case certified."""
    nfp = statement["predicate"]["nfp"]
    nfp["certified"].append({**nfp["certified"][0], "case": "h200-vllm==1-b"})


@pytest.mark.parametrize(
    ("change", "signed", "reason"),
    [
        (claim_more, {}, "certifies h200-vllm==1-b, which was not measured and passed: recorded, not measured"),
        (lambda s: s["predicate"]["nfp"]["certified"][0].update(nMax=4096), {}, "does not say what its record says"),
        (lambda s: s["predicate"].update(result="PASSED"), {}, "does not say what its record says"),
        (lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"), {}, "a foreign statement"),
        (lambda s: s["predicate"].pop("nfp"), {}, "a foreign statement: it lacks 'nfp'"),
        (lambda s: s["subject"][0]["digest"].update(sha256="00"), {}, "not the record that was certified"),
        (lambda s: s["predicate"]["nfp"]["validity"].update(notAfter="2026-05-01T00:00:00+00:00"), {}, "expired: it held until 2026-05"),
        (lambda s: s["predicate"]["nfp"]["validity"].update(notBefore="2027-01-01T00:00:00+00:00"), {}, "is the clock right"),
        (lambda s: s["predicate"]["nfp"]["validity"].update(notAfter="2027-01-01T00:00:00"), {}, "its validity can't be read"),
        (lambda s: s["predicate"]["nfp"]["certified"].append(3), {}, "a foreign statement"),
        (lambda s: s["predicate"]["nfp"].update(certified=3), {}, "a foreign statement"),
        (lambda s: s["subject"][0].update(name=7), {}, "a foreign statement"),
        (lambda s: None, {"kind": "application/json"}, "a foreign envelope"),
    ],
)  # fmt: skip
def test_a_statement_that_says_too_much_or_is_another_is_refused(
    made: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    signed: dict[str, Any],
    reason: str,
) -> None:
    """Even where the signature is good: claims are held to the record, dates to the clock, kinds to the standard's."""
    own, public = key(tmp_path)
    path = changed(made, tmp_path, change, own=own, **signed)
    with pytest.raises(Refused, match=reason):
        certificate.verify(path, None, public, NOW)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace('"_type"', '"_type":"x","_type"', 1), "stands twice in one object"),
        (
            lambda text: text.replace('"_type"', '"more":1,"_type"', 1),
            "the statement has other fields than were written: more",
        ),
        (
            lambda text: text.replace('"name":"record.json"', '"more":1,"name":"record.json"', 1),
            "its subject has other fields than were written: more",
        ),
        (
            lambda text: text.replace('"notAfter"', '"more":1,"notAfter"', 1),
            "its validity has other fields than were written: more",
        ),
        (lambda text: re.sub(r'"notAfter":"20..', '"notAfter":"2029', text), "no certificate may for more than 400"),
    ],
)
def test_a_statement_that_readers_may_read_apart_is_refused(
    made: tuple[Path, Path], tmp_path: Path, change: Callable[[str], str], reason: str
) -> None:
    """A name twice, fields that nobody wrote, a validity beyond what any may have: even where no signature could tell."""
    envelope = json.loads(made[0].read_text())
    payload = change(base64.b64decode(envelope["payload"]).decode())
    path = tmp_path / "certificate.json"
    envelope = {
        "payload": base64.b64encode(payload.encode()).decode(),
        "payloadType": envelope["payloadType"],
        "signatures": [],
    }
    path.write_text(json.dumps(envelope, indent=1) + "\n")
    with pytest.raises(Refused, match=reason):
        certificate.verify(path, made[0].parent / "record.json", None, NOW)


def test_another_key_no_key_and_no_signature_are_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Each with its reason; an unsigned one without a key agrees with its record, and nobody vouches for it."""
    path, _ = made
    _, other = key(tmp_path)
    with pytest.raises(Refused, match="signed by another key"):
        certificate.verify(path, None, other, NOW)
    with pytest.raises(Refused, match="give the signer's public key"):
        certificate.verify(path, None, None, NOW)
    unsigned = changed(made, tmp_path, lambda s: None)
    with pytest.raises(Refused, match="it is not signed"):
        certificate.verify(unsigned, None, other, NOW)
    assert certificate.verify(unsigned, None, None, NOW)[1] is False


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_changed_byte_is_refused(made: tuple[Path, Path], tmp_path: Path, data: st.DataObject) -> None:
    """Of the certificate or of its record, wherever it stands."""
    path, public = made
    name = data.draw(st.sampled_from(["certificate.json", "record.json"]))
    for own in ("certificate.json", "record.json"):
        (tmp_path / own).write_bytes((path.parent / own).read_bytes())
    content = bytearray((tmp_path / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    (tmp_path / name).write_bytes(bytes(content))
    with pytest.raises((Refused, FileError)):
        certificate.verify(tmp_path / "certificate.json", None, public, NOW)


def test_what_holds_today_does_not_hold_for_ever(made: tuple[Path, Path]) -> None:
    """180 days by default."""
    path, public = made
    certificate.verify(path, None, public, NOW + timedelta(days=180))
    with pytest.raises(Refused, match="expired"):
        certificate.verify(path, None, public, NOW + timedelta(days=181))


@pytest.mark.parametrize(
    ("cases", "partial", "reason"),
    [
        ([case("b")], False, "nothing in this record was measured and passed"),
        (
            [measured(tests={"boundary": TestResult(outcome="PASS", reasons=["baseline written"])})],
            False,
            "nothing in this record",
        ),
        ([measured(measured_at="2025-01-01T00:00:00+00:00")], False, "measured on 2025-01-01, more than 180 days ago"),
        ([measured()], True, "this run was interrupted"),
    ],
)
def test_what_can_not_be_certified_is_not(cases: list[CaseRecord], partial: bool, reason: str) -> None:
    """Predictions and recordings alone, what was held to nothing, what is too old, and a run that was cut short."""
    with pytest.raises(Refused, match=reason):
        certificate.statement_of(record(*cases, partial=partial), "record.json", "00", NOW)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Certify and verify by file and by environment: 0 holds, 1 refused or failed, 2 bad input, 3 unsigned; a key that others can
    read is refused, and what to do is said.
    """
    own, public = key(tmp_path)
    path = tmp_path / "record.json"
    now = datetime.now(UTC).isoformat()
    records.write(path, record(measured("\x1b[2Ja", measured_at=now)))
    assert main(["certify", str(path), "--key", str(own), "--days", "30"]) == 0
    assert "PASSED: 1 cases certified" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "certificate.json"), "--public-key", str(public)]) == 0
    assert "h200-vllm==1-\\u001b[2Ja: n_max 512 [512, 767]" in capsys.readouterr().out
    assert main(["certify", str(path), "--days", "99999999"]) == 1
    assert "more than the 400 that a certificate may hold" in capsys.readouterr().out
    own.chmod(0o640)
    assert main(["certify", str(path), "--key", str(own)]) == 1
    assert "others can read this key (mode 640): chmod 600" in capsys.readouterr().out
    assert main(["certify", str(path)]) == 0
    assert main(["verify", str(tmp_path / "certificate.json")]) == 3
    assert "its dates and name are not protected" in capsys.readouterr().out
    monkeypatch.setenv("NFP_SIGNING_KEY", own.read_text())
    assert main(["certify", str(path)]) == 0
    assert main(["verify", str(tmp_path / "certificate.json"), "--public-key", str(public)]) == 0
    monkeypatch.setenv("NFP_SIGNING_KEY", "no key")
    assert main(["certify", str(path)]) == 1
    assert "openssl genpkey -algorithm ed25519" in capsys.readouterr().out
    monkeypatch.delenv("NFP_SIGNING_KEY")
    records.write(path, record(measured(measured_at=now), measured("b", outcome="FAIL")))
    assert main(["certify", str(path)]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "certificate.json"), "--record", str(tmp_path / "none.json")]) == 2
    assert main(["certify", str(tmp_path / "none.json")]) == 2


def test_hostile_names_are_text_on_the_certificate() -> None:
    """Markup and marks of direction in a model's name."""
    hostile = "<script>alert(1)</script>\u202e\n"
    statement = certificate.statement_of(record(measured(hostile, kernel=hostile), gpu=hostile), hostile, "00", NOW)
    page = certificate.page(statement, None)
    assert "<script" not in page
    assert "\u202e" not in page
    assert "Not signed: nobody vouches for it" in page
