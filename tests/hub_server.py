"""A small imitation of the Hugging Face hub on this machine, for the real huggingface_hub."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .patience import PATIENCE

SHA = "1234567890abcdef1234567890abcdef12345678"
LARGE = (".gguf", ".safetensors", ".bin", ".pth")  # stored with a sha256; other files have git's object id
Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """The server.

    repos    name -> files
    cards    name -> the metadata of its page, such as {"license": "mit"}
    gated    repositories that need a token
    served   paths that were sent completely
    stalled  a path of which the server sends the first half, then nothing
    commit   the commit that main is at
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Files] = {}
        self.cards: dict[str, dict[str, Any]] = {}
        self.gated: set[str] = set()
        self.served: list[str] = []
        self.stalled = ""
        self.commit = SHA
        self.halfway = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo, revision = match.group(1, 2) if match else ("", "")
        if repo not in self.server.repos:
            return self.answer(401, X_Error_Code="RepoNotFound")
        if revision not in ("main", self.server.commit):
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if api:
            answer = json.dumps(self.listing(repo)).encode()
            return self.answer(200, answer, Content_Type="application/json")
        if repo in self.server.gated and "Bearer right" not in self.headers.get("Authorization", ""):
            return self.answer(403, X_Error_Code="GatedRepo")
        name = file[3] if file else ""
        if name not in self.server.repos[repo]:
            return self.answer(404, X_Error_Code="EntryNotFound")
        return self.send_file(name, self.server.repos[repo][name])

    def listing(self, repo: str) -> Any:
        """The hub's description of a repository, with its files."""
        entries = [{"rfilename": name, "size": len(body)} for name, body in self.server.repos[repo].items()]
        card = self.server.cards.get(repo, {})
        gated = "manual" if repo in self.server.gated else False
        return {"id": repo, "sha": self.server.commit, "siblings": entries, "cardData": card, "gated": gated}

    def send_file(self, name: str, body: bytes) -> None:
        if self.command == "GET" and name == self.server.stalled:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.halfway.set()
            self.connection.settimeout(PATIENCE)
            self.connection.recv(1)  # returns when the client leaves
            self.close_connection = True  # the client is gone: reading from it again would print a traceback
            return
        self.answer(200, body, ETag=f'"{etag(name, body)}"', X_Repo_Commit=self.server.commit)
        if self.command == "GET":
            self.server.served.append(name)


def git(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def etag(name: str, body: bytes) -> str:
    return hashlib.sha256(body).hexdigest() if name.endswith(LARGE) else git(body)


@contextmanager
def running(repos: dict[str, Files]) -> Iterator[Hub]:
    """A server of these repositories, which tests may change."""
    hub = Hub()
    hub.repos = {name: dict(files) for name, files in repos.items()}
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def environment(url: str, tmp_path: Path) -> dict[str, str]:
    """Environment variables for a server and an empty cache."""
    return {
        "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"),
        "HF_HUB_OFFLINE": "", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(tmp_path),
    }  # fmt: skip
