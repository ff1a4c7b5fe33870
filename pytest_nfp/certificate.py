"""Attestation of a run: an in-toto Statement with the test-result predicate over a record's digest, in a DSSE envelope.

What is certified was measured, in this record, and passed. What was recorded elsewhere, predicted or left open is named, and not
certified. https://in-toto.io/Statement/v1, https://in-toto.io/attestation/test-result/v0.1, https://github.com/secure-systems-lab/dsse.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pytest_nfp import records
from pytest_nfp.escaping import Shown
from pytest_nfp.files import FileError, parse_json
from pytest_nfp.records import CaseRecord, Record

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
PAYLOAD = "application/vnd.in-toto+json"
CERTIFICATE = "https://pytest-nfp/certificate/1"
DAYS, MOST_DAYS = 180, 400
"""How long a certificate holds where nothing else is asked for, and at the most: drivers and frameworks move faster than hardware."""
FIELDS = {"_type", "subject", "predicateType", "predicate"}
SUBJECT_FIELDS, VALIDITY_FIELDS = {"name", "digest"}, {"notBefore", "notAfter"}
"""Of a statement, its subject and its validity: no others are written."""
KEY_VARIABLE = "NFP_SIGNING_KEY"
MISSING = "certificates need securesystemslib and cryptography: pip install 'pytest-nfp[certificates]'"


class Refused(Shown):
    """A certificate that is not made, or not believed; the message says why."""


def is_certified(case: CaseRecord) -> bool:
    """Measured here, its boundary held to something, and passed: one that just became the baseline was held to nothing."""
    boundary = case.tests.get("boundary")
    passed = case.outcome == "PASS" and boundary is not None and boundary.outcome == "PASS" and bool(boundary.held_to)
    return passed and case.kind == "measured" and bool(case.curve) and case.n_max_interval is not None


def predicate_of(record: Record) -> dict[str, Any]:
    """The test-result predicate of a record: the same record gives the same."""
    failed = [c.id for c in record.cases if c.outcome in ("FAIL", "INVALID")]
    certified = [c for c in record.cases if is_certified(c)]
    others = [c.id for c in record.cases if not is_certified(c) and c.id not in set(failed)]
    protocol = {
        "tolerance": record.tolerance,
        "match_tolerance": record.match_tolerance,
        "protocol": record.protocol,
        "seed": record.seed,
    }
    digest = hashlib.sha256(_canonical(protocol)).hexdigest()
    return {
        "result": "FAILED" if failed else "WARNED" if others else "PASSED",
        "configuration": [{"name": "pytest-nfp protocol", "digest": {"sha256": digest}, "annotations": protocol}],
        "passedTests": [c.id for c in certified],
        "warnedTests": others,
        "failedTests": failed,
        "nfp": {
            "schema": CERTIFICATE,
            "tool": record.tool,
            "gpu": record.gpu,
            "measured": record.started,
            "machine": record.machine.get("identity", {}),
            "certified": [_claim(c) for c in certified],
            "notCertified": {c.id: why_not(c) for c in record.cases if not is_certified(c)},
        },
    }


def _claim(case: CaseRecord) -> dict[str, Any]:
    """What is said of a certified case, and the conditions under which it holds."""
    assert case.n_max_interval is not None
    return {
        "case": case.id,
        "model": case.subject,
        "backend": case.backend,
        "module": case.module,
        "workload": case.workload,
        "nMax": case.n_max,
        "interval": list(case.n_max_interval),
        "heldTo": case.tests["boundary"].held_to,
        "measuredAt": case.measured_at,
        "baselinePositions": case.baseline_positions,
        "kernel": case.kernel,
        "timer": case.timer,
        "graphModes": sorted(set(case.modes.values())),
    }


def why_not(case: CaseRecord) -> str:
    """Why a case is not certified, in a word or two."""
    if case.outcome != "PASS":
        return case.outcome
    if case.kind != "measured" or not case.curve:
        return f"{case.kind}, not measured in this run"
    return "its boundary was held to nothing: neither a prediction that describes the kernel nor a baseline that was there before"


def statement_of(record: Record, name: str, digest: str, now: datetime, days: int = DAYS) -> dict[str, Any]:
    """The Statement over a record's file. Raises Refused where nothing of it can be certified."""
    if days > MOST_DAYS:
        raise Refused(f"{days} days are more than the {MOST_DAYS} that a certificate may hold")
    if record.partial:
        raise Refused("this run was interrupted: certify a whole one (--nfp-resume goes on where it stopped)")
    predicate = predicate_of(record)
    if not predicate["passedTests"] and not predicate["failedTests"]:
        raise Refused(
            "nothing in this record was measured and passed: predictions and recordings of others are not certified"
        )
    # What was measured long ago holds no longer by being certified today.
    measured = [c.measured_at or record.started for c in record.cases if is_certified(c)]
    try:
        oldest = min((datetime.fromisoformat(at) for at in measured), default=now)
        validity = {"notBefore": _time(now), "notAfter": _time(oldest + timedelta(days=days))}
        is_old = now > oldest + timedelta(days=days)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(f"when it was measured, or {days} days after that, is no date: {error}") from error
    if is_old:
        raise Refused(f"it was measured on {oldest.date()}, more than {days} days ago: measure it again")
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}}],
        "predicateType": PREDICATE,
        "predicate": {**predicate, "nfp": {**predicate["nfp"], "validity": validity}},
    }


def write(record_path: Path, folder: Path, key: bytes | None, now: datetime, days: int = DAYS) -> dict[str, Any]:
    """Write certificate.json, signed where there is a key, and certificate.html; returns the Statement.

    key: Ed25519 in PEM (PKCS 8). Raises Refused, FileError.
    """
    from pytest_nfp.files import write_atomically

    try:
        digest = hashlib.sha256(record_path.read_bytes()).hexdigest()
    except OSError as error:
        raise FileError(f"{record_path}: can't be read: {error}") from error
    statement = statement_of(records.read(record_path), record_path.name, digest, now, days)
    envelope = _library().Envelope(_canonical(statement), PAYLOAD, {})
    signer = _signer(key) if key is not None else None
    if signer is not None:
        envelope.sign(signer)
    write_atomically(folder / "certificate.json", _text(envelope))
    keyid = signer.public_key.keyid if signer is not None else None
    write_atomically(folder / "certificate.html", page(statement, keyid))
    return statement


def verify(path: Path, record_path: Path | None, public_key: Path | None, now: datetime) -> tuple[dict[str, Any], bool]:
    """The Statement of a certificate that holds, and whether a signature of the key was checked.

    record_path: the file that it names, beside it, where none is given. Raises Refused with the reason, FileError.
    """
    library = _library()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    try:
        envelope = library.Envelope.from_dict(parse_json(text))
        is_ours = _text(envelope) == text
    except Exception as error:  # whatever a broken envelope makes the library raise
        raise Refused(f"not a DSSE envelope: {error}") from error
    if not is_ours:
        raise Refused("its bytes are not those that were written: it was changed")
    if envelope.payload_type != PAYLOAD:
        raise Refused(f"a foreign envelope: its payload is {envelope.payload_type}, not {PAYLOAD}")
    is_signed = _check_signature(envelope, public_key)
    statement = _parsed(envelope.payload)
    named = statement["subject"][0]
    record_path = record_path or path.parent / Path(named["name"]).name
    try:
        content = record_path.read_bytes()
    except OSError as error:
        raise FileError(f"{record_path}: the record that it certifies can't be read: {error}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != named["digest"]["sha256"]:
        raise Refused(f"{record_path.name} is not the record that was certified: its sha256 is {digest}")
    try:
        _check_claims(statement, records.read(record_path), now)
    except (TypeError, AttributeError, LookupError) as error:
        raise Refused(f"a foreign statement: {error}") from error
    return statement, is_signed


def _check_signature(envelope: Any, public_key: Path | None) -> bool:
    """Raises Refused for a signature that is missing, or not the key's."""
    if public_key is None:
        if envelope.signatures:
            raise Refused("it is signed: give the signer's public key (--public-key)")
        return False
    key = _public(public_key)
    if not envelope.signatures:
        raise Refused("it is not signed")
    from securesystemslib.exceptions import VerificationError

    try:
        envelope.verify([key], 1)
    except VerificationError:
        signers = ", ".join(k[:16] for k in envelope.signatures)
        if key.keyid not in envelope.signatures:
            raise Refused(f"signed by another key: {signers}, not {key.keyid[:16]}") from None
        raise Refused("its signature does not fit: it was changed after it was signed") from None
    return True


def _parsed(payload: bytes) -> dict[str, Any]:
    """Raises Refused for a Statement of another kind."""
    try:
        statement = parse_json(payload)
        kinds = statement["_type"], statement["predicateType"], statement["predicate"]["nfp"]["schema"]
        subject = statement["subject"]
        name, _ = subject[0]["name"], subject[0]["digest"]["sha256"]
        if not isinstance(name, str) or "\0" in name:
            raise ValueError("a name of its record")
    except (ValueError, LookupError, TypeError) as error:
        raise Refused(f"a foreign statement: it lacks {error}") from error
    if kinds != (STATEMENT, PREDICATE, CERTIFICATE) or len(subject) != 1:
        raise Refused(f"a foreign statement: {', '.join(map(str, kinds))}")
    parts = {
        "the statement": (statement, FIELDS),
        "its subject": (subject[0], SUBJECT_FIELDS),
        "its validity": (statement["predicate"]["nfp"].get("validity"), VALIDITY_FIELDS),
    }
    for part, (held, fields) in parts.items():
        if not isinstance(held, dict) or set(held) != fields:
            more = ", ".join(sorted(set(held) ^ fields)) if isinstance(held, dict) else "all of it"
            raise Refused(f"{part} has other fields than were written: {more}")
    found: dict[str, Any] = statement
    return found


def _check_claims(statement: Mapping[str, Any], record: Record, now: datetime) -> None:
    """Raises Refused where the Statement says more than its record, or holds no longer."""
    predicate = statement["predicate"]
    claimed = {k: v for k, v in predicate["nfp"].items() if k != "validity"}
    by_id = {c.id: c for c in record.cases}
    for claim in claimed.get("certified", []):
        case = by_id.get(claim.get("case"))
        if case is None or not is_certified(case):
            why = "not in the record" if case is None else why_not(case)
            raise Refused(f"it certifies {claim.get('case')}, which was not measured and passed: {why}")
    if _compared({**predicate, "nfp": claimed}) != _compared(predicate_of(record)):
        raise Refused("it does not say what its record says")
    validity = predicate["nfp"]["validity"]
    try:
        begins, ends = (datetime.fromisoformat(validity[name]) for name in ("notBefore", "notAfter"))
        is_over, is_to_come = now > ends, now < begins
    except (ValueError, LookupError, TypeError) as error:
        raise Refused(f"its validity can't be read: {error}") from error
    if ends - begins > timedelta(days=MOST_DAYS):
        raise Refused(
            f"it says that it holds for {(ends - begins).days} days; no certificate may for more than {MOST_DAYS}"
        )
    if is_over:
        raise Refused(f"expired: it held until {validity['notAfter']}")
    if is_to_come:
        raise Refused(f"it holds from {validity['notBefore']} on: is the clock right?")


def _compared(predicate: Mapping[str, Any]) -> dict[str, Any]:
    """A predicate without what a later release may word otherwise: why a case is not certified."""
    return {**predicate, "nfp": {**predicate["nfp"], "notCertified": sorted(predicate["nfp"]["notCertified"])}}


def page(statement: Mapping[str, Any], keyid: str | None) -> str:
    """The certificate as people read it, from the Statement alone."""
    from pytest_nfp.escaping import shown_text
    from pytest_nfp.report.html import environment

    told = json.loads(shown_text(json.dumps(statement)))
    text: str = environment().get_template("certificate.html").render(statement=told, keyid=keyid)
    return text


def signing_key(path: Path | None) -> bytes | None:
    """The key's PEM: of a file that nobody else can read, else of the environment; None where there is neither.

    Raises Refused for a file that others can read, FileError for one that can't be read.
    """
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").encode() or None
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Refused(f"{path}: others can read this key (mode {stat.S_IMODE(mode):o}): chmod 600 {path}")
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error}") from error


def _signer(pem: bytes) -> Any:
    """Raises Refused for what is no Ed25519 private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        private = load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise Refused(f"the key can't be used: {error}; make one with: openssl genpkey -algorithm ed25519") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise Refused("the key is not Ed25519; make one with: openssl genpkey -algorithm ed25519")
    return CryptoSigner(private)


def _public(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    except ValueError as error:
        raise FileError(f"{path}: not a public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise FileError(f"{path}: not an Ed25519 key")
    return SSlibKey.from_crypto(key)


def _library() -> Any:
    """Securesystemslib's DSSE. Raises FileError where it is not installed."""
    try:
        import cryptography  # noqa: F401
        from securesystemslib import dsse
    except ImportError as error:
        raise FileError(MISSING) from error
    return dsse


def _text(envelope: Any) -> str:
    return json.dumps(envelope.to_dict(), indent=1) + "\n"


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds")
