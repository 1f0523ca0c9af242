"""One call's sequences: run together, read as text, merged as they come, counted."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ...scheduler.errors import EngineDead
from ...scheduler.request import Request, TokenLogprobs
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .engine_client import EngineClient
from .own_queue import OwnQueue
from .protocol import PromptTokensDetails, Usage

_MAX_PENDING = 64  # deltas of one call that wait for a slow client before its sequences' readers wait too


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What choice `index` gained at once. The last one of a choice has a `finish_reason`."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    text_offsets: Sequence[int]
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # with the first delta


class Generation:
    """The sequences of one call: `requests[i]` becomes choice i; `choices_per_prompt` in turn have the same prompt.

    Usage is complete once `deltas` has ended.
    """

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, requests: Sequence[Request], choices_per_prompt: int
    ):
        self._engine = OwnQueue(engine) if len(requests) > 1 else engine
        self._tokenizer = tokenizer
        self._requests = requests
        self._choices_per_prompt = choices_per_prompt
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(requests)

    def __len__(self) -> int:
        return len(self._requests)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """All choices' deltas as they come. Closing it, or an error in one choice, aborts every sequence at once."""
        if len(self._requests) == 1:
            async with aclosing(self._run(0)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        pending: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(_MAX_PENDING)

        async def read(index: int) -> None:
            try:
                async with aclosing(self._run(index)) as deltas:
                    async for delta in deltas:
                        await pending.put(delta)
            except Exception as error:
                await pending.put(error)
            else:
                await pending.put(None)

        readers = [asyncio.create_task(read(i)) for i in range(len(self._requests))]
        try:
            running = len(readers)
            while running:
                item = await pending.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _run(self, index: int) -> AsyncGenerator[ChoiceDelta, None]:
        request = self._requests[index]
        detokenizer = Detokenizer(self._tokenizer, request.sampling, request.prompt_token_ids)
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                self._cached_tokens[index] = max(self._cached_tokens[index], output.num_cached_tokens)
                delta = detokenizer.add(output.token_ids, output.finish_reason)
                self._completion_tokens += delta.num_tokens
                yield ChoiceDelta(
                    index,
                    delta.text,
                    output.token_ids[: delta.num_tokens],
                    output.logprobs[: delta.num_tokens],
                    delta.text_offsets,
                    delta.finish_reason,
                    delta.stop_reason if delta.stop_reason is not None else output.stop_token_id,
                    output.prompt_logprobs,
                )
                if delta.finish_reason is not None:
                    return
        raise EngineDead("the engine ended a sequence without saying why; the same request may be sent again")

    def usage(self) -> Usage:
        """Prompts count once each, not once a choice; of a prompt, those tokens are cached that no choice computed."""
        n = self._choices_per_prompt
        prompt_tokens = sum(len(r.prompt_token_ids) for r in self._requests[::n])
        cached = sum(min(self._cached_tokens[i : i + n]) for i in range(0, len(self._requests), n))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


@dataclass(slots=True)
class Choice:
    """A choice as it adds up."""

    text: list[str]
    logprobs: list[Any]
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def take(self, delta: ChoiceDelta) -> None:
        self.text.append(delta.text)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
