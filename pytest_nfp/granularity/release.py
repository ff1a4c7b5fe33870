"""A release of a framework, opened once in a process and handed to all that reads it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from pytest_nfp import frameworks
from pytest_nfp.granularity import artifacts
from pytest_nfp.granularity.artifacts import Artifact, open_release
from pytest_nfp.granularity.maps import RuleUnknown


@lru_cache(maxsize=128)
def opened(framework: str, release: str, archives: Path | None = None) -> Artifact:
    """The files that the framework's record names. Raises RuleUnknown with every reason that was met."""
    known = frameworks.get(framework)
    if known is None or not known.files:
        raise RuleUnknown(f"{framework} has no tile rule here")
    found = open_release(framework, release, re.compile("|".join(known.files)), archives)
    if not found.names:
        raise RuleUnknown(f"{found.file} holds no file that matches {' or '.join(known.files)}")
    return found


def forget() -> None:
    """Forget every release that was opened and every page of the index: the next question asks again."""
    opened.cache_clear()
    artifacts.forget_index()
