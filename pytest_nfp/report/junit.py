"""A report as JUnit XML. It has only elements and attributes that every parser knows; numbers stay in the record."""

from __future__ import annotations

import xml.etree.ElementTree as ET  # written here, never parsed

from pytest_nfp.compare.changes import View
from pytest_nfp.records import CaseRecord, TestResult

FAILED = "FAIL"
BROKEN = "INVALID"


def junit(view: View) -> str:
    """One suite a record, one test a question of a case.

    FAIL is a failure, INVALID an error, any other outcome but PASS a skip.
    """
    root = ET.Element("testsuites")
    for record in view.runs:
        tests = [(c, question, test.outcome, test.reasons) for c in record.cases for question, test in _tests(c)]
        counts = {
            "tests": len(tests),
            "failures": sum(outcome == FAILED for _, _, outcome, _ in tests),
            "errors": sum(outcome == BROKEN for _, _, outcome, _ in tests),
            "skipped": sum(outcome not in ("PASS", FAILED, BROKEN) for _, _, outcome, _ in tests),
        }
        suite = ET.SubElement(root, "testsuite", name=f"pytest-nfp {record.gpu}", time="0")
        suite.attrib |= {name: str(n) for name, n in counts.items()}
        if record.started:
            suite.set("timestamp", record.started[:19])
        for case, question, outcome, reasons in tests:
            name = f"{case.subject}-{case.workload} {question}"
            element = ET.SubElement(suite, "testcase", classname=f"{case.gpu}.{case.backend}", name=name, time="0")
            message = "; ".join(reasons) or outcome
            if outcome == FAILED:
                ET.SubElement(element, "failure", message=message, type=outcome).text = message
            elif outcome == BROKEN:
                ET.SubElement(element, "error", message=message, type=outcome).text = message
            elif outcome != "PASS":
                ET.SubElement(element, "skipped", message=f"{outcome}: {message}")
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _tests(case: CaseRecord) -> list[tuple[str, TestResult]]:
    return sorted(case.tests.items()) or [("case", TestResult(outcome=case.outcome, reasons=case.reasons))]
