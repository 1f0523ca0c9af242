"""POST /v1/completions."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Response
from starlette.types import Receive

from ...scheduler.errors import InvalidRequest
from ...scheduler.request import MAX_N, Request, SamplingParams, SequenceOutput, TokenLogprobs
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .engine_client import EngineClient, ServedModel
from .generation import Choice, ChoiceDelta, Generation
from .protocol import Completion, CompletionChoice, CompletionRequest, check_token_ids, finite
from .transport import EventStream, json_response, off_loop, until_disconnect

MAX_CHOICES = 2048  # prompts times n, in one call
MAX_PROMPT_LOGPROBS = 1_000_000  # of one call: some 20 MB in the answer


async def completions(body: CompletionRequest, model: ServedModel, engine: EngineClient, receive: Receive) -> Response:
    """Complete prompts; choice `p * n + i` is the i-th of prompt p. Raises `InvalidRequest` before anything runs.

    `max_tokens: 0` gives back no token, which is of use with `echo`: so a text's own log-probabilities are had.
    """
    call_id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    if len(body.prompt) * min(body.n or 1, MAX_N) > MAX_CHOICES:  # n itself is checked with the sampling settings
        raise InvalidRequest(f"prompts times n must not be over {MAX_CHOICES}", "prompt")
    if body.max_tokens == 0:
        body, engine = body.model_copy(update={"max_tokens": 1}), _NoTokens(engine)
    requests, echoes = await _requests(body, model, call_id)
    generation = Generation(engine, model.tokenizer, requests, choices_per_prompt=body.n or 1)
    if body.stream:
        head = {"id": call_id, "object": "text_completion", "created": created, "model": model.id}
        return EventStream(_events(generation, head, model.tokenizer, echoes, body))
    choices = await until_disconnect(receive, _collect(generation, model.tokenizer, echoes, body.logprobs is not None))
    return json_response(
        Completion(id=call_id, created=created, model=model.id, choices=choices, usage=generation.usage())
    )


class _NoTokens:
    """The engine of calls that want no token; of their prompts they may want to know. A request has `max_tokens` 1."""

    def __init__(self, engine: EngineClient):
        self._engine = engine

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        nothing = SequenceOutput(request.request_id, (), finish_reason="length")
        if request.sampling.prompt_logprobs is None:
            yield nothing
            return
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                yield replace(nothing, prompt_logprobs=output.prompt_logprobs)


@dataclass(slots=True)
class _Echo:
    """What a choice's answer begins with: its prompt's text; with log-probabilities its tokens, too, and where in the
    text each begins."""

    text: str = ""
    token_ids: Sequence[int] = ()
    offsets: Sequence[int] = ()


async def _requests(body: CompletionRequest, model: ServedModel, call_id: str) -> tuple[list[Request], list[_Echo]]:
    """One request a choice, and the echo that its answer begins with."""
    seed = body.draw_seed()
    asked = 0
    if (form := body.form()) is not None:
        await asyncio.to_thread(form.check)
    requests: list[Request] = []
    echoes: list[_Echo] = []
    for prompt in body.prompt:
        ids = await prompt_token_ids(prompt, body.add_special_tokens is not False, model, "prompt")
        sampling = body.sampling(model, seed, len(ids), "prompt", form)
        if sampling.prompt_logprobs is not None:
            asked += len(ids) * (1 + sampling.prompt_logprobs) * sampling.n
            if asked > MAX_PROMPT_LOGPROBS:
                raise InvalidRequest(
                    f"the prompts' tokens times (1 + logprobs) times n must not be over {MAX_PROMPT_LOGPROBS}",
                    "logprobs",
                )
        echo = _echo(prompt, ids, sampling, model.tokenizer) if body.echo else _Echo()
        for _ in range(sampling.n):
            index = len(requests)  # over all prompts: equal prompts of a call draw differently
            requests.append(body.request(call_id, index, ids, sampling, model))
            echoes.append(replace(echo))
    return requests, echoes


def _echo(prompt: str | Sequence[int], ids: Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer) -> _Echo:
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, sampling.skip_special_tokens)
    if sampling.prompt_logprobs is None:
        return _Echo(text)
    read = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=sampling.skip_special_tokens)).add(ids)
    return _Echo(text, ids, [min(offset, len(text)) for offset in read.text_offsets])


async def prompt_token_ids(
    prompt: str | Sequence[int], add_special_tokens: bool, model: ServedModel, where: str
) -> tuple[int, ...]:
    """Of the field `where`. Raises `InvalidRequest`."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        ids = await off_loop(len(prompt), tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
    else:
        check_token_ids(where, prompt, model)
        ids = list(prompt)
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise InvalidRequest(f"{where} must not be empty: this model has no token that begins a text", where)
    return tuple(ids)


async def _collect(
    generation: Generation, tokenizer: Tokenizer, echoes: Sequence[_Echo], want_logprobs: bool
) -> list[CompletionChoice]:
    choices = [Choice([echo.text], []) for echo in echoes]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].take(delta)
            if want_logprobs:
                choices[delta.index].logprobs.append(delta)
    return [
        CompletionChoice(
            index=index,
            text="".join(choice.text),
            logprobs=_logprobs(choice.logprobs, tokenizer, echoes[index]) if want_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        for index, choice in enumerate(choices)
    ]


async def _events(
    generation: Generation, head: dict[str, Any], tokenizer: Tokenizer, echoes: list[_Echo], body: CompletionRequest
) -> AsyncGenerator[str, None]:
    """One chunk for what comes together; none while text is held back. JSON is in ASCII, as in chat's."""
    start = f'data: {json.dumps(head)[:-1]}, "choices": ['
    end = '], "usage": null}\n\n' if body.include_usage else "]}\n\n"
    continuous_usage = body.continuous_usage
    waiting: list[list[ChoiceDelta]] = [[] for _ in echoes]  # deltas whose text is held back
    unsaid = [echo.text for echo in echoes]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            i = delta.index
            if body.logprobs is not None:
                waiting[i].append(delta)
            text = unsaid[i] + delta.text
            if not text and delta.finish_reason is None:
                continue
            unsaid[i] = ""
            logprobs = "null"
            if waiting[i]:
                logprobs = json.dumps(_logprobs(waiting[i], tokenizer, echoes[i]))
                waiting[i] = []
            stop = f', "stop_reason": {json.dumps(delta.stop_reason)}' if delta.finish_reason else ""
            if continuous_usage:
                end = f'], "usage": {generation.usage().model_dump_json()}}}\n\n'
            yield (
                f'{start}{{"index": {i}, "text": {json.dumps(text)}, "logprobs": {logprobs}, '
                f'"finish_reason": {json.dumps(delta.finish_reason)}{stop}}}{end}'
            )
    if body.include_usage:
        yield f'{start}], "usage": {generation.usage().model_dump_json()}}}\n\n'
    yield "data: [DONE]\n\n"


def _logprobs(deltas: Sequence[ChoiceDelta], tokenizer: Tokenizer, echo: _Echo) -> dict[str, list[Any]]:
    """OpenAI's parallel arrays. `text_offset` counts characters of the choice's text; a token may have none of its own.

    A dictionary of likeliest tokens always has the chosen one; of tokens that look alike it has the likeliest. The
    first token of an echoed prompt has neither: nothing stands before it.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []

    def add(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        for token_id, at in zip(token_ids, logprobs, strict=True):
            tokens.append(tokenizer.token_text(token_id))
            token_logprobs.append(finite(at.logprob))
            top: dict[str, float] = {}
            for other, value in (*at.top, (token_id, at.logprob)):
                top.setdefault(tokenizer.token_text(other), finite(value))
            top_logprobs.append(top)

    for delta in deltas:
        if echo.token_ids:
            tokens.append(tokenizer.token_text(echo.token_ids[0]))
            token_logprobs.append(None)
            top_logprobs.append(None)
            add(echo.token_ids[1:], delta.prompt_logprobs)
            offsets += echo.offsets
            echo.token_ids = ()  # said
        add(delta.token_ids, delta.logprobs)
        offsets += [len(echo.text) + offset for offset in delta.text_offsets]
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }
