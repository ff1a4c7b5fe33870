"""From records to what people read: HTML, Markdown, JUnit, and a summary on the terminal. Numbers come from the record alone."""

from pytest_nfp.report.files import write_reports

__all__ = ["write_reports"]
