"""Time servers that speak OpenAI's API, side by side: tokens a second and time to the first token, for 1 to N clients.

    clearllama serve -m model.gguf --port 8001 &
    llama-server -m model.gguf --port 8002 --parallel 16 &
    python scripts/compare_server.py clearllama=http://127.0.0.1:8001 llama-server=http://127.0.0.1:8002

In each round, every server in turn answers the same questions from 1 client, then from N clients at once. A server that
is not measured is idle. Ratios are the first server's tokens a second to the other's in the same round. Needs openai.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass

import openai

TOPICS = (
    "rivers", "llamas", "bread", "glass", "wind", "paper", "salt", "trains",
    "bees", "bridges", "clocks", "stars", "tea", "soil", "maps", "rain",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What one server did: tokens a second over all clients, and the median and largest time to the first token."""

    tps: float
    first: float
    slowest: float


async def ask(client: openai.AsyncOpenAI, model: str, question: str, tokens: int) -> tuple[int, float]:
    """One streamed answer: (new tokens, seconds to the first one)."""
    began, first, count = time.perf_counter(), 0.0, 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if not first and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - began
        if chunk.usage:
            count = chunk.usage.completion_tokens
    return count, first


async def measure(url: str, clients: int, tokens: int, round: int) -> Run:
    """Let a number of clients ask at once."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        model = (await client.models.list()).data[0].id
        questions = [
            f"Explain {TOPICS[i % len(TOPICS)]} in detail, part {round * clients + i}." for i in range(clients)
        ]
        began = time.perf_counter()
        found = await asyncio.gather(*(ask(client, model, question, tokens) for question in questions))
        seconds = time.perf_counter() - began
    firsts = [first for _, first in found]
    return Run(sum(count for count, _ in found) / seconds, statistics.median(firsts), max(firsts))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    servers = dict(server.split("=", 1) for server in args.servers)
    runs: dict[tuple[str, int], list[Run]] = {}
    for round in range(args.rounds + 1):  # round 0 warms up
        for clients in args.clients:
            for name, url in servers.items():
                run = asyncio.run(measure(url, clients, args.tokens, round))
                if round:
                    runs.setdefault((name, clients), []).append(run)
    reference = next(iter(servers))
    print("| server | clients | tokens/s | first token, s (median, largest) | ratio |\n|---|---|---|---|---|")
    for (name, clients), found in runs.items():
        ratios = [ours.tps / theirs.tps for ours, theirs in zip(runs[reference, clients], found, strict=True)]
        tps, first, slowest = (
            statistics.median(getattr(one, key) for one in found) for key in ("tps", "first", "slowest")
        )
        print(f"| {name} | {clients} | {tps:.0f} | {first:.2f}, {slowest:.2f} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
