"""The process that answers questions about rules: started in an empty folder, read within limits, ended whatever happens."""

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
"""Seconds without a line after which the process is ended: a question has less processor time than that."""
MAX_LINE_BYTES, MAX_OUTPUT_BYTES, MAX_ERROR_BYTES = 1 << 20, 64 << 20, 1 << 16
"""Of one answer, of all answers, and of all errors of a process."""
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Written:
    """Whole lines that a process wrote, and how it ended: "" where it ended by itself and well."""

    lines: tuple[str, ...]
    ended: str


def run(request: dict[str, Any], seconds: int) -> Written:
    """What a fresh, confined process writes of a request: at the most its walls and a line a question.

    seconds: processor time of a question, for the reason where it ran out.
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
    """Output, errors, and why reading was given up; "" where both pipes were closed."""
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    output, errors = kept.values()
    whole = lines = 0  # Where the last whole line ends, and how many there are.
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
        # Closed pipes are no proof that it ended by itself: it has a moment to.
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
