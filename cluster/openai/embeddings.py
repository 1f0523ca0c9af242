"""POST /v1/embeddings: hidden states of the loaded model, pooled. Nothing is generated."""

import asyncio
import base64
import struct
import uuid
from collections.abc import Sequence
from contextlib import aclosing

from fastapi import Response
from starlette.types import Receive

from ...scheduler.errors import ContextLengthExceeded, EngineDead
from ...scheduler.request import Request, SamplingParams, SequenceOutput
from .completions import prompt_token_ids
from .engine_client import EngineClient, ServedModel
from .own_queue import OwnQueue
from .protocol import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from .transport import json_response, until_disconnect

_AT_ONCE = 64  # inputs of a call: the queue of a model would not hold all that it may have


async def embeddings(body: EmbeddingRequest, model: ServedModel, engine: EngineClient, receive: Receive) -> Response:
    """One embedding an input, each of length 1. Raises `InvalidRequest` before anything runs."""
    call_id = f"embd-{uuid.uuid4().hex}"
    requests = []
    for index, text in enumerate(body.input):
        ids = await prompt_token_ids(text, body.add_special_tokens is not False, model, "input")
        if len(ids) >= model.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {model.max_model_len} tokens, and input {index} has {len(ids)}; shorten it",
                "input",
            )
        requests.append(
            Request(
                f"{call_id}-{index}",
                ids,
                SamplingParams(max_tokens=1, seed=0),
                model=model.id,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                pooling=body.pooling or "last",
            )
        )
    outputs = await until_disconnect(receive, _run(engine, requests))
    num_tokens = sum(len(r.prompt_token_ids) for r in requests)
    as_text = body.encoding_format == "base64"
    data = [Embedding(index=i, embedding=_written(o.embedding, as_text)) for i, o in enumerate(outputs)]
    return json_response(
        EmbeddingList(
            model=model.id, data=data, usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        )
    )


async def _run(engine: EngineClient, requests: Sequence[Request]) -> list[SequenceOutput]:
    """What each request ends with. An error in one of them aborts all."""

    room, patient = asyncio.Semaphore(_AT_ONCE), OwnQueue(engine)

    async def last(request: Request) -> SequenceOutput:
        async with room, aclosing(patient.generate(request)) as outputs:
            async for output in outputs:
                if output.finish_reason is not None:
                    return output
        raise EngineDead("the engine ended a request without saying why; the same request may be sent again")

    tasks = [asyncio.create_task(last(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _written(embedding: bytes, as_text: bool) -> list[float] | str:
    if as_text:
        return base64.b64encode(embedding).decode()
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))
