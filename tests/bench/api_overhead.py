"""What the ingress does per streamed token, apart from Serve and sockets: detokenize, find stop strings, write events.

    python tests/bench/api_overhead.py MODEL [--tokens 400] [--streams 8] [--rounds 5]

MODEL gives the tokenizer alone. CPU time of this process, over all tokens; medians of the rounds.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator

from pagedray.cluster.openai.engine_client import ServedModel
from pagedray.cluster.openai.router import build_app
from pagedray.cluster.text.tokenizer import Tokenizer
from pagedray.scheduler.request import Request, SequenceOutput, TokenLogprobs

TEXT = "The quick brown fox jumps over the lazy dog, and the dog, being lazy, lets it. " * 40
KINDS = {
    "chat": {},
    "chat, 2 stop strings": {"stop": ["fox leaps", "\n\n\n"]},
    "chat, 5 logprobs": {"logprobs": True, "top_logprobs": 5},
    "chat, tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
}


class Repeater:
    """An engine that says the same to everyone, a token at a time."""

    def __init__(self, ids: list[int]):
        self.ids = ids

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        k = request.sampling.logprobs
        logprobs = () if k is None else (TokenLogprobs(-0.5, tuple((i, -1.0 - i) for i in range(k))),)
        last = request.sampling.max_tokens - 1
        for n in range(last + 1):
            token = self.ids[n % len(self.ids)]
            yield SequenceOutput(request.request_id, (token,), logprobs, "length" if n == last else None)
            await asyncio.sleep(0)


async def stream(app, body: bytes) -> None:
    sent = False

    async def receive():
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        assert message.get("status", 200) == 200

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    await app({**scope, "http_version": "1.1", "scheme": "http", "server": ("x", 1), "root_path": ""}, receive, send)


async def none() -> bytes:
    return b""


async def measure(app, fields: dict, tokens: int, streams: int) -> float:
    """Microseconds of CPU a token."""
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    body = json.dumps(message | fields).encode()
    began = time.process_time()
    await asyncio.gather(*(stream(app, body) for _ in range(streams)))
    return (time.process_time() - began) / (tokens * streams) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model)
    served = {"m": ServedModel("m", tokenizer, 4096, 0, tool_call_parser="hermes")}
    app = build_app(lambda: served, Repeater(tokenizer.encode(TEXT)), none, none)
    print("| what | µs a token |\n|---|---|")
    for kind, fields in KINDS.items():
        rounds = [asyncio.run(measure(app, fields, args.tokens, args.streams)) for _ in range(args.rounds + 1)]
        print(f"| {kind} | {statistics.median(rounds[1:]):.1f} |")


if __name__ == "__main__":
    main()
