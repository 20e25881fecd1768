"""The text of single tokens."""

from __future__ import annotations

from typing import Any

from ..tokenizer import Tokenizer


class Spelling:
    """Spells single ids: the text of a token, its bytes if they are not UTF-8, and the name of a control token."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.raw = tokenizer, tokenizer.token_bytes

    def text(self, id: int) -> str:
        """The text of a token as OpenAI's API writes it, with "bytes:\\xe2" for bytes that are not UTF-8."""
        try:
            return self.tokenizer.name(id) or self.raw(id).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(id))

    def entry(self, id: int) -> dict[str, Any]:
        """A token as the page needs it: an object with its text or bytes. A token without bytes is a control token."""
        data, name = self.raw(id) if id < self.tokenizer.n_vocab else b"", self.tokenizer.name(id)
        if name or not data:
            return {"id": id, "text": name or f"<{id}>", "control": True}
        try:
            return {"id": id, "text": data.decode()}
        except UnicodeDecodeError:
            return {"id": id, "bytes": list(data)}
