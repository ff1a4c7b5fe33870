"""Reports from records: HTML, Markdown, JUnit, and a summary on the terminal. All numbers come from the record."""

from pytest_nfp.report.files import write_reports

__all__ = ["write_reports"]
