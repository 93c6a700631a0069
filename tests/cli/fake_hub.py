"""A hub of one repository on this machine, which counts the bytes of each file that it sends."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

_COMMIT = "0" * 40


class FakeHub:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.sent: Counter[str] = Counter()
        self.url = ""


@contextmanager
def fake_hub(name: str, folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(name, folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on standard error."""

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{name}"):
                files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                about = {"id": name, "sha": _COMMIT, "siblings": files, "private": False}
                self._send(200, json.dumps(about).encode(), {}, with_body)
                return
            found = re.fullmatch(rf"/{name}/resolve/[^/]+/(.+)", path)
            file = folder / found[1] if found else None
            if file is None or not file.exists():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
                return
            content = file.read_bytes()
            head = {"ETag": f'"{file.name}"', "X-Repo-Commit": _COMMIT}
            status = 200
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
                head["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                content, status = content[first : last + 1], 206
            if with_body:
                hub.sent[file.name] += len(content)
            self._send(status, content, head, with_body)

        def _send(self, status: int, content: bytes, head: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in {**head, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
