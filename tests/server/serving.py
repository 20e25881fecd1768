"""A server in this process, on a free port of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn

from llama.cli import serve
from llama.server.app import Server
from llama.server.connections import configuration
from llama.server.engine import Engine
from llama.server.limits import Limits
from llama.text import Llama


class Running:
    """A server that runs. `url` is its address without a path."""

    def __init__(self, llm: Llama, key: str | None, limits: Limits, hosts: Sequence[str] = ()):
        self.engine = Engine(llm, limits)
        self.server = Server(self.engine, "tiny", key)
        listener = serve.bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = self.server.app([*hosts, "127.0.0.1", "localhost"])
        self.uvicorn = uvicorn.Server(configuration(app, limits))
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listener],), daemon=True)
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(5)
        self.uvicorn.force_exit = True  # a failed test may have left answers without an end
        self.thread.join()
        self.engine.close(finish=False)


def with_tools(llm: Llama) -> Llama:
    """The same model, with a template that writes the names of tools."""
    names = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    return Llama(llm.model, llm.tokenizer, f"{names}{llm.chat_template}")


@contextmanager
def running(llm: Llama, key: str | None = None, *, hosts: Sequence[str] = (), **limits: Any) -> Iterator[Running]:
    server = Running(llm, key, Limits(**{"waiting": 64, **limits}), hosts)
    try:
        yield server
    finally:
        server.close()
