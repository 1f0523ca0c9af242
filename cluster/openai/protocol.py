"""The wire: OpenAI's chat completions and completions, vLLM's further fields, the error envelope.

Types are strict: `"0"` is no number and `true` is no integer; null means left out. Fields that change no token are
accepted and ignored, so are unknown ones (with a warning); a known field that would change the answer and is not
supported is refused by name. Ranges of sampling settings are `SamplingParams`'s to check.
"""

import logging
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from json import dumps
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from ...scheduler.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, PagedRayError
from ...scheduler.names import nearest
from ...scheduler.request import MAX_LOGPROBS, Pooling, Request, SamplingParams, StructuredOutputsParams
from ..text.grammar import check_grammar
from ..text.tool_calls import required_schema
from .engine_client import ServedModel

logger = logging.getLogger(__name__)

MAX_ECHO = 200  # characters of a client's input that an error message may repeat
MAX_MESSAGE = 1000  # characters of an error message; a chat template's own words may be long
MAX_TOOLS = 128  # OpenAI's bound
MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say

# Fields that are accepted and change no token here.
_IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prediction verbosity length_penalty guided_decoding_backend request_id "
    "spaces_between_special_tokens mm_processor_kwargs best_of function_call".split()
)

# Fields that would change the answer and are not supported, with the values that ask for nothing (null always does).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "documents": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}


def short(value: Any) -> str:
    """A client's value for a message, cut to `MAX_ECHO` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"


# -- requests ----------------------------------------------------------------------------------------------------------


# JSON numbers have no bound; these keep messages that repeat them short.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _refuse(extra: Mapping[str, Any], names: Mapping[str, tuple[Any, ...]], who: str) -> None:
    """Raises `InvalidRequest` for the first of these fields that asks for something: not for null, nor its harmless
    values."""
    for name, harmless in names.items():
        value = extra.get(name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name} is not supported by {who}", name)


def _note_unknown(names: Collection[str]) -> None:
    if names:
        logger.warning("ignored unknown fields of a request: %s", short(sorted(names)))  # quoted: no line of its own


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: so far, in each chunk


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(BaseModel):
    """A request's JSON body."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None

    @classmethod
    def parse(cls, body: Any) -> Self:
        """Raises `InvalidRequest` for the first thing that is wrong with a parsed JSON body."""
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            raise _invalid(error, body) from None
        request._check_fields()
        return request

    def _check_fields(self) -> None:
        """Raises `InvalidRequest` where fields do not go together."""


class DetokenizeRequest(Body):
    tokens: Annotated[list[Int], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Form:
    """The form that an answer must have, and the field that asked for it."""

    params: StructuredOutputsParams
    param: str

    def check(self) -> None:
        """Raises `InvalidRequest` for one that cannot be kept to. May take some 20 ms."""
        check_grammar(self.params, self.param)


class GenerationRequest(Body):
    """What both endpoints take."""

    default_max_tokens: ClassVar[int | None]  # None: as far as the context allows

    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[Annotated[list[str], Field(fail_fast=True)] | None, BeforeValidator(_as_list)] = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # ours: seconds to the first token, past which the answer is worth nothing
    ttft_target: Annotated[float, Field(gt=0)] | None = None
    # vLLM's
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    return_token_strs: bool | None = None  # of /tokenize
    # The form of the answer, in OpenAI's way, vLLM's, and vLLM's older one
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def _check_fields(self) -> None:
        extra = self.model_extra or {}
        _refuse(extra, UNSUPPORTED, "this server")
        if extra.get("best_of") not in (None, self.n or 1):
            raise InvalidRequest("best_of is not supported by this server, other than equal to n", "best_of")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed together with stream: true", "stream_options")
        _note_unknown(extra.keys() - _IGNORED - UNSUPPORTED.keys())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to report at each position; None to report nothing."""
        raise NotImplementedError

    def asked_max_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value if the client gave one."""
        return "max_tokens", self.max_tokens

    def sampling(
        self,
        model: ServedModel,
        seed: int,
        num_prompt_tokens: int,
        where: str,
        form: Form | None = None,
    ) -> SamplingParams:
        """How to answer a prompt of so many tokens; `where` is the field that held it. Raises `InvalidRequest`."""
        limit = model.max_model_len
        if num_prompt_tokens >= limit:
            raise ContextLengthExceeded(
                f"this model's context is {limit} tokens, and the prompt alone has {num_prompt_tokens}; shorten it",
                where,
            )
        name, max_tokens = self.asked_max_tokens()
        room = limit - num_prompt_tokens
        if max_tokens is not None and max_tokens > room:
            raise ContextLengthExceeded(
                f"this model's context is {limit} tokens; the prompt has {num_prompt_tokens} and {name} asks for "
                f"{max_tokens} more, together {num_prompt_tokens + max_tokens}",
                name,
            )
        if max_tokens is None and self.default_max_tokens is not None:
            max_tokens = min(self.default_max_tokens, room)  # None: as far as its group's context goes
        if max_tokens is None and (self.min_tokens or 0) > room:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}; the context has room for {room}", "min_tokens")
        check_token_ids("stop_token_ids", self.stop_token_ids or (), model)
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{**model.sampling_defaults, **given},
            max_tokens=max_tokens,
            seed=seed,
            logprobs=self.num_logprobs(),
            logit_bias=self._logit_bias(model),
            structured_outputs=None if form is None else form.params,
        )

    def request(
        self, call_id: str, index: int, prompt: tuple[int, ...], sampling: SamplingParams, model: ServedModel
    ) -> Request:
        """The engine's request for choice `index` of the call."""
        return Request(
            f"{call_id}-{index}",
            prompt,
            sampling,
            model=model.id,
            index=index,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            ttft_target=self.ttft_target,
        )

    def form(self) -> Form | None:
        """The form that is asked for, not checked yet. Raises `InvalidRequest` where the fields say none or several."""
        forms: dict[str, dict[str, Any]] = {}
        if self.structured_outputs is not None:
            forms["structured_outputs"] = self.structured_outputs
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                forms[f"guided_{kind}"] = {kind: value}
        if self.response_format is not None and self.response_format.type == "json_object":
            forms["response_format"] = {"json_object": True}
        elif self.response_format is not None and self.response_format.type == "json_schema":
            if self.response_format.json_schema is None:
                raise InvalidRequest("response_format of type json_schema needs json_schema", "response_format")
            forms["response_format"] = {"json": self.response_format.json_schema.schema_}
        if len(forms) > 1:
            raise InvalidRequest(f"{' and '.join(sorted(forms))} exclude each other", min(forms))
        for param, wish in forms.items():
            if unknown := wish.keys() - _FORMS:
                raise InvalidRequest(f"{param} has no {short(min(unknown))}{nearest(min(unknown), _FORMS)}", param)
            try:
                form = StructuredOutputsParams(**wish)
            except InvalidRequest as error:
                raise InvalidRequest(error.message.replace("structured_outputs", param, 1), param) from None
            return Form(form, param)
        return None

    def draw_seed(self) -> int:
        return self.seed if self.seed is not None else secrets.randbits(63)

    def _logit_bias(self, model: ServedModel) -> dict[int, float]:
        bias = {}
        for key, value in (self.logit_bias or {}).items():
            if not re.fullmatch("[0-9]{1,10}", key):
                raise InvalidRequest(f"logit_bias must have token ids as its keys, not {short(key)!r}", "logit_bias")
            bias[int(key)] = value
        check_token_ids("logit_bias", bias, model)
        return bias


_FORMS = {f.name for f in fields(StructuredOutputsParams)}
_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)


def check_token_ids(name: str, token_ids: Collection[int], model: ServedModel) -> None:
    """Raises `InvalidRequest` where one is outside the vocabulary."""
    size = model.tokenizer.vocab_size
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
        wrong = next(t for t in token_ids if not 0 <= t < size)
        raise InvalidRequest(f"{name} must hold token ids from 0 to {size - 1}, not {short(wrong)}", name)


class ChatMessage(BaseModel):
    """A message; its content's parts and its calls are the chat template's business, and are passed on as they came."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Any = None


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: NamedFunction


# OpenAI's, and vLLM's max
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# What chat.py passes to the template itself.
_TEMPLATE_ARGUMENTS = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}


class ChatCompletionRequest(GenerationRequest):
    default_max_tokens = None

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    # vLLM's
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed together with logprobs: true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        if taken := _TEMPLATE_ARGUMENTS & (self.chat_template_kwargs or {}).keys():
            raise InvalidRequest(f"chat_template_kwargs may not set {min(taken)}", "chat_template_kwargs")
        for name in ("echo", "add_special_tokens"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported for chat by this server", name)
        names = [tool.function.name for tool in self.tools or ()]
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools to choose from", "tool_choice")
        choice = self.effective_tool_choice
        if choice not in ("none", "auto", "required", *names):
            raise InvalidRequest(
                f"tool_choice names {short(choice)!r}{nearest(choice[:MAX_ECHO], names)}", "tool_choice"
            )

    @property
    def effective_tool_choice(self) -> str:
        """none, auto, required, or the name of a function."""
        if not self.tools:
            return "none"
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice or "auto"

    @property
    def template_variables(self) -> dict[str, Any]:
        """The chat template's further ones. `enable_thinking` is Qwen3's switch, and that of many others."""
        effort = self.reasoning_effort
        wished = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return wished | (self.chat_template_kwargs or {})

    def form(self) -> Form | None:
        form, choice = super().form(), self.effective_tool_choice
        if choice in ("none", "auto"):
            return form
        if form is not None:
            raise InvalidRequest(
                "tool_choice sets the form of the answer, so none other can be asked for", "tool_choice"
            )
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools or ()]
        schema = required_schema(functions, self.parallel_tool_calls is not False)
        if choice != "required":
            schema = next(f for f in functions if f["name"] == choice).get("parameters") or {"type": "object"}
        return Form(StructuredOutputsParams(json=dumps(schema)), "tools")

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def asked_max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().asked_max_tokens()


# Fields of the other endpoints that would change the answer, with the values that ask for nothing, as above.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": (),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
}


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True)

    effort: Effort | None = None


class ResponsesRequest(Body):
    """A request of the Responses API; `responses` reads what it shares with chat."""

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None  # nothing is cut off: what is too long is refused
    metadata: dict[str, str] | None = None

    def _check_fields(self) -> None:
        extra = self.model_extra or {}
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if extra.get(name):
                raise InvalidRequest(f"{name} is not supported: this server stores no responses", name)
        _refuse(extra, _OTHERS, "/v1/responses")
        known = {*ChatCompletionRequest.model_fields, *UNSUPPORTED, *_IGNORED, *_OTHERS, "include"}
        _note_unknown(extra.keys() - known)


def _prompts(value: Any) -> list[str | list[int]]:
    """The four forms of `prompt`, and of an embedding's `input`, as one: a list of texts or lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(p, str) for p in value):
            return value
        if all(type(p) is int for p in value):
            return [value]
        if all(isinstance(p, list) and p and all(type(t) is int for t in p) for p in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists; no list empty")


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Prompts = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _TOKEN_IDS, {**_TEXTS, "items": _TOKEN_IDS}]}),
]


class CompletionRequest(GenerationRequest):
    default_max_tokens = 16

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    # vLLM's
    add_special_tokens: bool | None = None

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) is over max_tokens (0)", "min_tokens")

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def sampling(self, *args: Any, **kwargs: Any) -> SamplingParams:
        sampling = super().sampling(*args, **kwargs)
        return sampling.clone(prompt_logprobs=self.logprobs) if self.echo else sampling


MAX_INPUTS = 2048  # of one call for embeddings, as OpenAI has it


class EmbeddingRequest(Body):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    user: str | None = None
    pooling: Pooling | None = None  # ours: how the states of an input's tokens become one; "last" where left out
    # vLLM's
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None

    def _check_fields(self) -> None:
        if self.dimensions is not None:
            raise InvalidRequest("dimensions is not supported: an embedding is as long as a hidden state", "dimensions")
        if len(self.input) > MAX_INPUTS:
            raise InvalidRequest(f"input must have at most {MAX_INPUTS} items, not {len(self.input)}", "input")
        extra = self.model_extra or {}
        if extra.get("truncate_prompt_tokens") is not None:
            raise InvalidRequest("truncate_prompt_tokens is not supported by this server", "truncate_prompt_tokens")
        _note_unknown(extra.keys() - {"truncate_prompt_tokens"})


# What a pydantic error type asks for, in this API's words.
_WANTED = {
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be under {lt}",
    "literal_error": "must be {expected}",
    "too_long": "must have at most {max_length} items",
    "string_pattern_mismatch": "must match {pattern}",
}


def _invalid(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    """OpenAI's way to say where: `messages[0].role`. Only the first error is told, without the input.

    Of a field that may be of several types, that is an error of the type that comes nearest.
    """
    errors = error.errors(include_url=False, include_input=False)
    steps = [_steps(e["loc"], body, missing=e["type"] == "missing") for e in errors]
    same = [i for i, e in enumerate(errors) if e["loc"][0] == errors[0]["loc"][0]]
    nearest_one = 0
    if len(steps[0]) < len(errors[0]["loc"]):
        nearest_one = max(same, key=lambda i: (len(steps[i]), not errors[i]["type"].endswith(("_type", "_error"))))
    first, where = errors[nearest_one], ""
    for step in steps[nearest_one]:
        where += f"[{step}]" if isinstance(step, int) else f".{step}" if where else step
    if first["type"] in _WANTED:
        wanted = _WANTED[first["type"]].format(**first.get("ctx", {}))
    else:
        wanted = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(short(f"{short(where)} {wanted}"), short(where))


def _steps(loc: Sequence[str | int], body: Any, missing: bool) -> list[str | int]:
    """What of an error's place is in the body: not the names that pydantic gives to the types a field may have."""
    steps: list[str | int] = []
    for i, step in enumerate(loc):
        if isinstance(step, int):
            body = body[step] if isinstance(body, list) and step < len(body) else None
        elif isinstance(body, dict) and (step in body or (missing and i == len(loc) - 1)):
            body = body.get(step)
        else:
            continue
        steps.append(step)
    return steps


def resolve_model(name: str | None, models: Mapping[str, ServedModel]) -> ServedModel:
    """The model of this name; the only one that is served if no name is given.

    Raises `ModelNotFound`, or `InvalidRequest` where a name is needed.
    """
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if not name:
        raise InvalidRequest(f"model must name one of the models served here: {', '.join(sorted(models))}", "model")
    if name not in models:
        raise ModelNotFound(f"the model {short(name)!r} does not exist{nearest(name[:MAX_ECHO], models)}", "model")
    return models[name]


# -- responses ---------------------------------------------------------------------------------------------------------
# Streams write their chunks from templates; these are for the answers that are sent whole.


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(BaseModel):
    """With `reasoning`, the same as `reasoning_content`, and `tool_calls` where there are any."""

    model_config = ConfigDict(extra="allow")

    role: str = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str
    stop_reason: str | int | None = None  # vLLM's: the stop string or token


class ChatCompletion(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str
    stop_reason: str | int | None = None


class Completion(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None = None


class Embedding(BaseModel):
    object: str = "embedding"
    index: int
    embedding: list[float] | str  # text: base64 of fp32, little endian


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: str = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelCard(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "pagedray"
    root: str
    parent: None = None
    max_model_len: int

    @classmethod
    def of(cls, model: ServedModel) -> Self:
        return cls(id=model.id, created=model.created, root=model.id, max_model_len=model.max_model_len)


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


def error_envelope(error: PagedRayError) -> dict[str, Any]:
    """OpenAI's form of an error: all four keys always."""
    return {
        "error": {
            "message": error.message[:MAX_MESSAGE],
            "type": error.type,
            "param": getattr(error, "param", None),
            "code": error.code,
        }
    }


def finite(logprob: float) -> float:
    """`logprob` as JSON can say it."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # NaN too: it is greater than nothing
