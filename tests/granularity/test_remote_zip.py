"""Wheels read by ranges from a server of our own: what comes back, and how few requests it takes."""

from __future__ import annotations

import random
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pytest_nfp.granularity import artifacts
from pytest_nfp.granularity.maps import RuleUnknown
from pytest_nfp.granularity.remote_zip import READ_AHEAD_BYTES, open_zip


class Server:
    """Serves one file by ranges, and counts requests and bytes."""

    def __init__(self, data: bytes) -> None:
        self.requests = self.sent = 0
        self.broken = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                start = int(first) if first else max(0, len(data) - int(last))
                end = min(len(data) - 1, int(last)) if first and last else len(data) - 1
                part = data[start : end + 1]
                outer.requests += 1
                if outer.broken:
                    self.send_error(503)
                    return
                outer.sent += len(part)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part)

            def log_message(self, *arguments: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/a.whl"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


FILES = {f"vllm/fused_moe/part{i:03}.py": f"# {i}\n" * 300 for i in range(60)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A wheel with sixty small files between two large ones."""
    rng = random.Random(0)
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("vllm/kernels.so", rng.randbytes(3_000_000))
        for name, text in FILES.items():
            z.writestr(name, text)
        z.writestr("vllm/other.so", rng.randbytes(3_000_000))
    found = Server((tmp_path / "a.whl").read_bytes())
    yield found
    found.close()


def test_neighbouring_files_come_with_few_requests_and_the_rest_of_the_wheel_stays_away(server: Server) -> None:
    """Every text is whole, in any order; the two large files are not read."""
    with open_zip(server.url, 10) as archive:
        names = sorted(FILES, reverse=True)
        random.Random(1).shuffle(names)
        for name in names:
            assert archive.read(name).decode() == FILES[name]
        assert server.requests < 12
        assert server.sent < 1_000_000
        assert server.sent > READ_AHEAD_BYTES


def test_a_file_larger_than_what_is_read_ahead_is_whole(server: Server) -> None:
    """Its own length counts; zip's checksum agrees."""
    with open_zip(server.url, 10) as archive:
        assert len(archive.read("vllm/other.so")) == 3_000_000
        assert archive.testzip() is None


def test_a_server_that_fails_in_the_middle_makes_the_rule_unknown(server: Server) -> None:
    """The reason names the file; nothing else is raised."""
    remote = artifacts._Remote(server.url, "a.whl", "0" * 64, re.compile("part"))
    assert len(remote.names()) == len(FILES)
    server.broken = True
    with pytest.raises(RuleUnknown, match=r"part000\.py from the package index failed"):
        remote.read("vllm/fused_moe/part000.py")
