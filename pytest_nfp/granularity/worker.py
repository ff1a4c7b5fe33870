"""The process that answers questions about rules.

It starts in an empty folder, its output is read within limits, and it is ended whatever happens.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SANDBOX = Path(__file__).with_name("sandbox.py")
SILENT_S = 9.0
"""The process is ended after so many seconds without a line. A question has less processor time than that."""
MAX_LINE_BYTES, MAX_OUTPUT_BYTES, MAX_ERROR_BYTES = 1 << 20, 64 << 20, 1 << 16
"""Most bytes of one answer, of all answers, and of all errors of a process."""
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Written:
    """What a process wrote, and how it ended."""

    lines: tuple[str, ...]
    """Whole lines of its output."""
    ended: str
    """How it ended. "" where it ended by itself and without an error."""


def run(request: dict[str, Any], seconds: int) -> Written:
    """What a fresh, confined process writes in answer to a request: at most its walls and one line for each question.

    seconds: processor time of a question, named in the reason where it ran out.
    """
    most_lines = len(request["questions"]) + 1
    with tempfile.TemporaryDirectory(prefix="nfp-rule-") as folder, tempfile.TemporaryFile() as given:
        given.write(json.dumps(request).encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-W", "ignore", str(SANDBOX)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, errors, stopped = _read(process, most_lines)
        finally:
            _end(process)
    lines = [line.decode(errors="replace") for line in output.split(b"\n")[:-1]]
    return Written(tuple(lines), stopped or _how_it_ended(process.returncode, errors, seconds))


def _read(process: subprocess.Popen[bytes], most_lines: int) -> tuple[bytes, bytes, str]:
    """Output, errors, and why reading was stopped; "" if both pipes were closed."""
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    output, errors = kept.values()
    whole = lines = 0  # Where the last whole line ends, and how many whole lines there are.
    deadline = time.monotonic() + SILENT_S
    stopped = ""
    with selectors.DefaultSelector() as pipes:
        for pipe in kept:
            pipes.register(pipe, selectors.EVENT_READ)
        while pipes.get_map() and not stopped:
            ready = pipes.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                stopped = f"it wrote nothing for {SILENT_S:g} s"
            for key, _ in ready:
                chunk = os.read(key.fd, CHUNK_BYTES)
                if not chunk:
                    pipes.unregister(key.fd)
                    continue
                kept[key.fd] += chunk
                if key.fd == process.stdout.fileno() and b"\n" in chunk:
                    whole = output.rindex(b"\n")
                    lines += chunk.count(b"\n")
                    deadline = time.monotonic() + SILENT_S
            if len(output) - whole > MAX_LINE_BYTES or len(output) > MAX_OUTPUT_BYTES or len(errors) > MAX_ERROR_BYTES:
                stopped = "it wrote more than an answer can have"
            elif lines > most_lines:
                stopped = "it wrote more answers than it was asked for"
    return bytes(output), bytes(errors), stopped


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        # With its pipes closed the process may still run: it has a moment to end by itself.
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _how_it_ended(code: int, errors: bytes, seconds: int) -> str:
    if code == 0:
        return ""
    if code == -signal.SIGXCPU:
        return f"it did not end within {seconds} s of processor time"
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    if last:
        return last[0]
    return f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
