"""stub"""

from typing import Any


class ToolCallStream:
    def __init__(self, tools: Any): ...
    def feed(self, text: str) -> list[Any]:
        return [text]

    def end(self) -> list[Any]:
        return []
