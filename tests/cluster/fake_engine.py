"""An engine that says what a test tells it, and a tiny byte-level tokenizer to say it in."""

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from pagedray.cluster.text.tokenizer import Tokenizer
from pagedray.scheduler.errors import Overloaded
from pagedray.scheduler.request import Request, SequenceOutput, TokenLogprobs

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOS, EOS, EOS2 = "<s>", "<|end|>", "<|eot|>"


@cache
def byte_tokenizer(bos: bool = True, template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """A token for every byte, a few for whole words, three special ones; `bos`: whether texts begin with a BOS."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("Ġ", "w"), ("c", "d"), ("cd", "e")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in (BOS, EOS, EOS2)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS if bos else None,
        eos_token=EOS,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    ends = [backend.token_to_id(t) for t in (EOS, EOS2)]
    return Tokenizer(wrapped, ends, "tiny")


# What a sequence does next: tokens that come together, seconds of waiting, or an error.
Step = Sequence[int] | float | Exception


class FakeEngine:
    """An `EngineClient`. `script` gives each request's steps; the fake ends a sequence as an engine would.

    `aborted` and `running` hold request ids; with `room` for so many, the queue is full for any other. `max_model_len`
    ends what nothing else does.
    """

    def __init__(self, tokenizer: Tokenizer, script: Callable[[Request], Iterable[Step]] | None = None):
        self.tokenizer = tokenizer
        self.script = script or (lambda request: self.spell("Hello world"))
        self.num_cached_tokens = 0
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.room = math.inf
        self.max_model_len = math.inf
        self.aborted: list[str] = []

    def spell(self, text: str, together: int = 1, end: str = EOS) -> list[Step]:
        """Steps that say a text, so many bytes at once, and end."""
        ids = [i for b in text.encode() for i in self._byte(b)]
        ids += self.tokenizer.encode(end, add_special_tokens=False)
        return [ids[i : i + together] for i in range(0, len(ids), together)]

    def _byte(self, byte: int) -> list[int]:
        return [next(i for i in range(256) if self.tokenizer.token_bytes(i) == bytes([byte]))]

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        if len(self.running) >= self.room:
            raise Overloaded("the queue is full")
        sampling = request.sampling
        self.requests.append(request)
        self.running.add(request.request_id)
        count, reason, stop_token = 0, None, None
        k = sampling.prompt_logprobs
        told = () if k is None else tuple(self._logprobs(t, k) for t in request.prompt_token_ids[1:])
        try:
            if request.pooling:
                await asyncio.sleep(0)
                reason = "stop"
                yield SequenceOutput(request.request_id, (), (), reason, embedding=self.embed(request))
                return
            for step in self.script(request):
                if isinstance(step, Exception):
                    raise step
                await asyncio.sleep(step if isinstance(step, float) else 0)
                if isinstance(step, float):
                    continue
                tokens: list[int] = []
                for token in step:
                    tokens.append(token)
                    count += 1
                    if count > sampling.min_tokens and token in sampling.stop_token_ids:
                        reason, stop_token = "stop", token
                    elif token in self.tokenizer.eos_token_ids and not sampling.ignore_eos:
                        reason = "stop"
                    elif count == sampling.max_tokens or len(request.prompt_token_ids) + count >= self.max_model_len:
                        reason = "length"
                    if reason:
                        break
                yield SequenceOutput(
                    request.request_id,
                    tuple(tokens),
                    tuple(self._logprobs(t, sampling.logprobs) for t in tokens)
                    if sampling.logprobs is not None
                    else (),
                    reason,
                    stop_token,
                    self.num_cached_tokens,
                    prompt_logprobs=told,
                )
                told = ()
                if reason:
                    return
        finally:
            self.running.discard(request.request_id)
            if reason is None:
                self.aborted.append(request.request_id)

    @staticmethod
    def embed(request: Request) -> bytes:
        """Three numbers: how it was pooled, how long the prompt was, and a third."""
        return struct.pack("<3f", float(request.pooling == "mean"), len(request.prompt_token_ids), 1 / 3)

    @staticmethod
    def _logprobs(token: int, k: int) -> TokenLogprobs:
        """Tokens 10, 11, … are likeliest; the chosen one could hardly be less likely."""
        return TokenLogprobs(-1e30, tuple((10 + i, -1.0 - i) for i in range(k)))
