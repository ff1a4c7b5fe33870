"""From records to what people read: HTML, and a summary on the terminal. Numbers come from the record alone."""

from pytest_nfp.report.html import write_reports

__all__ = ["write_reports"]
