"""nfp certify: attest a record. nfp verify: check such a certificate, offline."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_nfp.cli import options

REFUSED = 1
UNSIGNED = 3


def add(commands: Any) -> None:
    """Declare the two commands."""
    p = commands.add_parser(
        "certify",
        help="certify what a record measured",
        description="An in-toto Statement (test-result) over a record's sha256, in a DSSE envelope: certificate.json, and"
        " certificate.html for people. Only what was measured in that run and passed is certified. Exit 0 written, 1 refused or"
        " the record has failures, 2 bad input.",
        epilog="example: openssl genpkey -algorithm ed25519 -out key.pem; chmod 600 key.pem; nfp certify reports/h200/record.json"
        " --key key.pem",
    )
    p.add_argument("record", type=Path, metavar="RECORD", help="record.json of a run")
    p.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="Ed25519 private key in PEM, readable by you alone (default: NFP_SIGNING_KEY)",
    )
    p.add_argument("--days", type=options.positive, help="days that it holds (default 180, at most 400)")
    p.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write to (default: the record's, where verify looks)",
    )
    p.set_defaults(run=run_certify)

    p = commands.add_parser(
        "verify",
        help="does a certificate hold?",
        description="Signature, the record's digest, its claims against the record, and its dates; nothing is fetched. Exit 0 it"
        " holds, 1 refused, 2 bad input, 3 it holds but is not signed.",
        epilog="example: nfp verify certificate.json --public-key key.pub",
    )
    p.add_argument("certificate", type=Path, metavar="CERTIFICATE", help="certificate.json")
    p.add_argument("--public-key", type=Path, metavar="FILE", help="the signer's Ed25519 public key in PEM")
    p.add_argument("--record", type=Path, metavar="FILE", help="the record (default: the one it names, beside it)")
    p.set_defaults(run=run_verify)


def run_certify(given: argparse.Namespace) -> int:
    """Write a certificate. Raises FileError."""
    from pytest_nfp import certificate
    from pytest_nfp.escaping import shown_line
    from pytest_nfp.files import FileError

    folder = given.output or given.record.parent
    try:
        key = certificate.signing_key(given.key)
        statement = certificate.write(given.record, folder, key, datetime.now(UTC), given.days or certificate.DAYS)
    except certificate.Refused as reason:
        print(shown_line(f"refused: {reason}"))
        return REFUSED
    except OSError as error:
        raise FileError(f"{folder}: can't be written: {error}") from error
    predicate = statement["predicate"]
    print(f"{predicate['result']}: {len(predicate['passedTests'])} cases certified, {_rest(predicate)}")
    print(
        f"{folder / 'certificate.json'}, {'signed' if key else 'not signed (--key signs)'}; {folder / 'certificate.html'}"
    )
    return REFUSED if predicate["result"] == "FAILED" else 0


def run_verify(given: argparse.Namespace) -> int:
    """Check a certificate. Raises FileError."""
    from pytest_nfp import certificate
    from pytest_nfp.escaping import shown_line

    try:
        statement, is_signed = certificate.verify(given.certificate, given.record, given.public_key, datetime.now(UTC))
    except certificate.Refused as reason:
        print(shown_line(f"refused: {reason}"))
        return REFUSED
    predicate = statement["predicate"]
    nfp = predicate["nfp"]
    if not is_signed:
        print("its dates and name are not protected: whoever has the file can write others (--key signs)")
    print(
        f"{'holds' if is_signed else 'agrees with its record, but is not signed'} until {nfp['validity']['notAfter']}"
    )
    print(
        f"{predicate['result']}: {len(predicate['passedTests'])} cases certified, {_rest(predicate)}, on {nfp['gpu']}"
    )
    for claim in nfp["certified"]:
        print(shown_line(f"  {claim['case']}: n_max {claim['nMax']} {claim['interval']}"))
    if predicate["result"] == "FAILED":
        return REFUSED
    return 0 if is_signed else UNSIGNED


def _rest(predicate: dict[str, Any]) -> str:
    return f"{len(predicate['warnedTests'])} not certified, {len(predicate['failedTests'])} failed"
