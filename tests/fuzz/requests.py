"""Bodies of requests to the server, up to prompts that are ready for the batch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from llama.server import app
from llama.server.requests import CHAT_FIELDS, TEXT_FIELDS, Call, parse_body, parse_chat, parse_text
from llama.text import Llama
from llama.tokenizer.gguf import from_metadata

from .. import tiny
from . import law
from .mutate import json_node

TOOL = {"name": "look", "description": "Look up.", "parameters": {"type": "object", "properties": {}}, "strict": True}
CHATS: tuple[dict[str, Any], ...] = (
    {
        "model": "tiny", "messages": [{"role": "user", "content": "Hello <|im_end|> there"}], "temperature": 0.5,
        "top_p": 0.9, "seed": 7, "max_tokens": 9, "n": 2, "stop": ["\n", "<|im_end|>"], "logprobs": True,
        "top_logprobs": 3, "user": "u", "presence_penalty": 0.1, "frequency_penalty": -1, "logit_bias": {"5": -100},
    },
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " short."}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<|im_start|>"}'}}]},
            {"role": "tool", "content": "[1]", "tool_call_id": "1", "name": "look"},
        ],
        "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto", "parallel_tool_calls": False,
        "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 3, "min_p": 0.1, "top_k": 4,
    },
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "text"}, "repetition_penalty": 1.1},
)  # fmt: skip
TEXTS: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "prompt": "a b c", "max_tokens": 0, "echo": True, "logprobs": 2, "stop": "end"},
    {"prompt": ["a", "<|im_end|>"], "n": 2, "temperature": 0, "logit_bias": {"1": 0.5}, "suffix": None},
    {"prompt": [1, 2, 3], "stream": True},
    {"prompt": [[5], [6, 7]], "seed": 0},
)
# A message about a value in a field names a part of the field, or its place
PARTS = ("the body", "the prompt", "the text", "a message", "message", "tool", "function", "schema", "stop string")


class Harness(law.Harness):
    """The input is a body, and also the seed of a body of valid JSON with a few other values than one of the seeds."""

    allowed = ("subprocess.Popen",)  # the processes that render chat templates and try grammars
    words = tuple(b'"%s"' % name.encode() for name in (*CHAT_FIELDS, *TEXT_FIELDS, "role", "content", "type", "text",
                  "function", "parameters", "tool", "json_object", "json_schema", "required", "none"))  # fmt: skip

    def __init__(self, folder: Path):
        super().__init__(folder)
        tokenizer = from_metadata(tiny.byte_vocabulary(), "tiny")
        self.llm = Llama(tiny.model(), tokenizer, tiny.CHATML)
        self.control = {tokenizer.control[name] for name in ("<|im_start|>", "<|im_end|>")}

    def seeds(self) -> Iterable[bytes]:
        yield from (json.dumps(body).encode() for body in (*CHATS, *TEXTS))

    def calls(self, data: bytes) -> Iterator[law.Call]:
        chance = random.Random(data)
        valid = chance.choice(list(self.seeds()))
        for _ in range(chance.choice((1, 1, 2, 4))):
            valid = json_node(valid, chance)
        for body in (data, valid.decode("latin-1").encode()):
            yield partial(self.parse, body, b'"messages"' in body)

    def parse(self, raw: bytes, chat: bool) -> None:
        """Parse a body. Raises Finding if the response to an error is not that of a wrong request, or names nothing."""
        try:
            body = parse_body(raw)
            call = (parse_chat if chat else parse_text)(body, self.llm, "tiny")
        except app.LlamaError as error:
            self.check_refusal(error)
            raise
        self.check(body, call, chat)

    def check_refusal(self, error: app.LlamaError) -> None:
        response = app._refusal(error)
        content = json.loads(bytes(response.body))["error"]
        if not 400 <= response.status_code < 500 or content.keys() != {"message", "type", "param", "code"}:
            raise law.Finding(f"status {response.status_code}: {content}")
        message = content["message"]
        if len(message) > 2000 or not any(part in message for part in (*PARTS, *CHAT_FIELDS, *TEXT_FIELDS)):
            raise law.Finding(f"a message that is too long or names no field: {message:.300}")

    def check(self, body: dict[str, Any], call: Call, chat: bool) -> None:
        """Raises Finding if a field is ignored, answers are missing, or ids don't exist or control the chat."""
        if unknown := body.keys() - {*(CHAT_FIELDS if chat else TEXT_FIELDS)}:
            raise law.Finding(f"a request with {unknown} is accepted")
        prompt = body.get("prompt")
        several = not chat and isinstance(prompt, list) and isinstance(prompt[0], str | list)
        if len(call.prompts) != call.n * (len(prompt) if several else 1):  # type: ignore[arg-type]
            raise law.Finding(f"{len(call.prompts)} answers to {body!r:.300}")
        for i, one in enumerate(call.prompts):
            ids = one.request.prompt
            source = prompt[i // call.n] if several else prompt  # type: ignore[index]
            if not all(0 <= id < self.llm.model.config.vocab_size for id in ids):
                raise law.Finding(f"an id does not exist: {ids[:20]}")
            control = [id for id in ids if id in self.control]
            expected = 2 * len(body["messages"]) + 1 if chat else int(source == "")
            if (chat or isinstance(source, str)) and len(control) != expected:
                raise law.Finding(f"{len(control)} control ids instead of {expected}: {body!r:.300}")
