"""Offline inference: `LLM(...).generate(...)`, with vLLM's names and shapes.

Of one rank it is in this process and needs no Ray. Of several, this process is rank 0, and Ray has the others.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from ..scheduler.errors import InvalidRequest
from ..scheduler.request import Request, SamplingParams, SequenceOutput, TokenLogprobs
from ..workers.checkpoint.load import Progress
from ..workers.checkpoint.locate import sampling_defaults
from ..workers.config import EngineConfig
from ..workers.engine import Engine
from ..workers.executor import Executor, make_executor
from .config import check_split
from .text.detokenizer import Detokenizer
from .text.grammar import GrammarCompiler, check_grammar
from .text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `logprobs` has, per generated token, the likeliest tokens' and the chosen one's, by token id."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token or string; None for end of sequence


@dataclass(slots=True)
class RequestOutput:
    """`prompt_logprobs` has None for the first token, and for the others what a choice's `logprobs` has for its own."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return all(o.finish_reason for o in self.outputs)


class LLM:
    """A model in this process; with `tensor_parallel_size` or `pipeline_parallel_size` over 1, in several.

    `close` ends the other ranks, and Ray if it was started for them; so do leaving a `with` and the end of the program.
    `model` is a Hugging Face folder or hub id, or a GGUF file. Other arguments are the engine's settings under vLLM's
    names (`EngineConfig`). Raises `ConfigError` or `CheckpointError` where they cannot be had.
    """

    def __init__(self, model: str, tokenizer: str | None = None, use_tqdm: bool = True, **engine_kwargs: Any):
        config = EngineConfig.from_kwargs("LLM", model=str(model), tokenizer=tokenizer, **engine_kwargs)
        self._sampling_defaults = sampling_defaults(config)
        with tqdm(desc="Loading weights", unit="B", unit_scale=True, disable=not use_tqdm) as bar:
            executor, leave = _executor(config, lambda done, total: _show(bar, done, total))
        self.close = weakref.finalize(self, leave)
        self.engine = Engine(config, grammar_backend=GrammarCompiler, executor=executor)
        self.tokenizer = Tokenizer.load(config.model, config.tokenizer)
        self._request_ids = itertools.count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """How the model's makers would have it sampled (`generation_config`), for calls without `sampling_params`."""
        return SamplingParams(**self._sampling_defaults)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: strings, lists of token ids, or vLLM's {"prompt": ...} and {"prompt_token_ids": ...}.

        Returns one output a prompt, in order. Raises `InvalidRequest` before anything runs if one of them cannot run.
        """
        encoded = [self._encode(p) for p in _as_list(prompts)]
        return self._run(encoded, self._one_each(sampling_params, len(encoded)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [
            (
                None,
                self.tokenizer.apply_chat_template(
                    list(conversation),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                ),
            )
            for conversation in conversations
        ]
        return self._run(encoded, self._one_each(sampling_params, len(encoded)), use_tqdm)

    def _one_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if len(params) != count:
            raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts: give one, or one a prompt")
        return list(params)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        content: Any = prompt
        if isinstance(prompt, Mapping):
            content = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if content is None:
                raise InvalidRequest(
                    f"a prompt's mapping needs prompt or prompt_token_ids; it has {list(prompt)}", "prompt"
                )
        if isinstance(content, str):
            return content, self.tokenizer.encode(content)
        try:
            return None, [operator.index(t) for t in content]
        except TypeError:
            raise InvalidRequest(
                f"a prompt must be text or a list of token ids, not {content!r:.200}", "prompt"
            ) from None

    def _run(
        self, encoded: Sequence[tuple[str | None, list[int]]], sampling: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        for form in {p.structured_outputs for p in sampling if p.structured_outputs}:
            check_grammar(form, "structured_outputs")
        results: list[RequestOutput] = []
        choices: dict[str, _Choice] = {}
        added: list[str] = []
        try:
            for (text, token_ids), params in zip(encoded, sampling, strict=True):
                request_id = str(next(self._request_ids))
                result = RequestOutput(request_id, text, token_ids, [CompletionOutput(i) for i in range(params.n)])
                if params.prompt_logprobs is not None:
                    result.prompt_logprobs = [None]
                results.append(result)
                if params.seed is None:
                    params = params.clone(seed=hash((self.engine.config.seed, int(request_id))))
                for output in result.outputs:
                    request = Request(f"{request_id}-{output.index}", tuple(token_ids), params, index=output.index)
                    self.engine.add_request(request)
                    added.append(request.request_id)
                    choices[request.request_id] = _Choice(result, output, self.tokenizer, params)
            with tqdm(total=len(choices), desc="Generating", unit="seq", disable=not use_tqdm) as bar:
                while choices:
                    for news in self.engine.step():
                        choice = choices.get(news.request_id)
                        if choice is not None and choice.add(news):
                            del choices[news.request_id]
                            if not news.finish_reason:  # a stop string: the engine does not know
                                self.engine.abort_request(news.request_id)
                            bar.update()
        finally:  # an interrupt, or a request that was refused: the others must not run on
            for request_id in added:
                self.engine.abort_request(request_id)
        return results


class _Choice:
    """A choice that grows."""

    def __init__(self, result: RequestOutput, output: CompletionOutput, tokenizer: Tokenizer, sampling: SamplingParams):
        self.result = result
        self.output = output
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer, sampling, result.prompt_token_ids)
        if sampling.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0

    def add(self, news: SequenceOutput) -> bool:
        """Take in what the engine gained. True once the choice is finished."""
        output, result = self.output, self.result
        if news.prompt_logprobs and result.prompt_logprobs == [None]:  # the other choices have the same
            pairs = zip(result.prompt_token_ids[1:], news.prompt_logprobs, strict=True)
            result.prompt_logprobs += [self._by_token(token_id, logprobs) for token_id, logprobs in pairs]
        result.num_cached_tokens = max(result.num_cached_tokens, news.num_cached_tokens)
        delta = self.detokenizer.add(news.token_ids, news.finish_reason)
        token_ids = news.token_ids[: delta.num_tokens]
        output.text += delta.text
        output.token_ids += token_ids
        if output.logprobs is not None and output.cumulative_logprob is not None:
            for token_id, logprobs in zip(token_ids, news.logprobs, strict=False):
                output.cumulative_logprob += logprobs.logprob
                output.logprobs.append(self._by_token(token_id, logprobs))
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason if delta.stop_reason is not None else news.stop_token_id
        return delta.finish_reason is not None

    def _by_token(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        values = dict(logprobs.top) | {token_id: logprobs.logprob}
        return {t: Logprob(v, self.tokenizer.token_text(t)) for t, v in values.items()}


def _executor(config: EngineConfig, progress: Progress) -> tuple[Executor, Callable[[], None]]:
    """What computes, and a function that ends it."""
    if config.world_size == 1:
        executor = make_executor(config, progress, grammar_backend=GrammarCompiler)
        return executor, executor.close
    check_split(config, "LLM")
    from .driver_ranks import DriverRanks  # with Ray, which one rank does without

    ranks = DriverRanks(config)
    try:
        executor = make_executor(config, progress, ranks.places.launch, ranks.host, GrammarCompiler)
    except BaseException:
        ranks.close()
        raise

    def leave() -> None:
        executor.close()
        ranks.close()

    return executor, leave


def _show(bar: tqdm, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    single = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
