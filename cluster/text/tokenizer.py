"""Text to token ids and back, and chat templates, for Hugging Face folders and GGUF files alike."""

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from ...scheduler.errors import CheckpointError, InvalidRequest
from ...workers.checkpoint.config import read_eos_token_ids
from ...workers.checkpoint.gguf_file import GGUFFile, eos_token_ids
from ...workers.checkpoint.locate import locate
from .gguf_tokenizer import build_backend, special_tokens

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    `backend` is the `tokenizers.Tokenizer` underneath, which `tokenizers.decoders.DecodeStream` wants.
    """

    def __init__(self, wrapped: Any, eos_ids: Sequence[int], name: str):
        """`wrapped` is a `transformers.PreTrainedTokenizerFast`; `name`, a path maybe, is for messages."""
        self._wrapped = wrapped
        self._name = Path(name).name  # clients read them
        self.backend: Backend = wrapped.backend_tokenizer
        self.backend.no_truncation()  # some tokenizer.json files bring a training run's length limit
        self.backend.no_padding()
        self.bos_token_id: int | None = wrapped.bos_token_id
        own = wrapped.eos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(eos_ids) or (() if own is None else (own,))
        added = self.backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = len(wrapped)
        self._bytes: dict[int, bytes] = {}  # of tokens that were seen: every one that is streamed is asked for
        self._read_bytes = TokenBytes(self.backend)
        self._reserved = set(inspect.signature(wrapped.apply_chat_template).parameters) - {"documents", "kwargs"}
        self._reserved |= {"messages", *wrapped.special_tokens_map}

    @classmethod
    def load(cls, model: str, tokenizer: str | None = None) -> "Tokenizer":
        """Of a folder, a .gguf file or a hub id; `tokenizer` names another place to take it from.

        Raises `CheckpointError` where there is none or it is damaged or of an unknown kind.
        """
        path = locate(tokenizer or model, weights=False)
        if path.is_file():
            file = GGUFFile(path)
            return cls(_wrap_gguf(file), eos_token_ids(file), str(path))
        home = path if tokenizer is None else locate(model, weights=False)
        eos_ids = read_eos_token_ids(home) if home.is_dir() else eos_token_ids(GGUFFile(home))
        return cls(_load_folder(path), eos_ids, str(path))

    # text → ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """With the special tokens that the model wants around a text; a BOS that `text` spells out is not doubled.

        Raises `InvalidRequest` for text that is not Unicode: a lone half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text holds a lone surrogate at character {error.start}: not valid Unicode") from None
        # `encode` would hold the GIL throughout, and so stop everybody's streams while a long text is read.
        ids = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapped.chat_template)

    @property
    def chat_template(self) -> str:
        """The default one's source; empty where there is none."""
        template = self._wrapped.chat_template or ""
        return template.get("default", "") if isinstance(template, Mapping) else template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Messages in OpenAI's form to the ids of a prompt, as the model's own template writes it.

        The template writes special tokens itself, so none are added. `kwargs` are the template's further variables.
        Raises `InvalidRequest` for messages that have no text form, and with the template's own words where it refuses.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                f"{self._name} has no chat template: use completions, "
                "or let the operator set tokenizer to a folder or file that has one"
            )
        if reserved := sorted(self._reserved & kwargs.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {reserved[0]}", "chat_template_kwargs")
        no_objects: list[str] = []  # where calls have other arguments
        plain = [_plain_message(message, f"messages[{i}]", no_objects) for i, message in enumerate(messages)]
        if no_objects:
            logger.warning(
                "arguments of %d calls of a request are no JSON object, and {} for the chat template: the first in %s",
                len(no_objects),
                no_objects[0],
            )
        for i, role in enumerate(message["role"] for message in plain):
            if role not in ROLES and not self._names_role(role):
                raise InvalidRequest(
                    f"messages[{i}].role must be one of {', '.join(ROLES)}, or another that the chat template of "
                    f"{self._name} names, not {role[:64]!r}",
                    f"messages[{i}].role",
                )
        if not plain:
            raise InvalidRequest("messages must not be empty", "messages")
        try:
            text = self._wrapped.apply_chat_template(
                self._with_known_roles(plain),
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except Exception as error:  # whatever a template's code can raise: Jinja's own errors, TypeError, KeyError …
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)

    def _with_known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """OpenAI's `function` under its later name, and `developer` under its earlier one unless the template names it:
        most templates would leave such messages out.

        As in vLLM `developer` joins `system` in one message at the start: few templates take a second, or a later one.
        """
        messages = [{**m, "role": "tool"} if m["role"] == "function" else m for m in messages]
        if self._names_role("developer") or all(m["role"] != "developer" for m in messages):
            return messages
        told = [m["content"] for m in messages if m["role"] in ("system", "developer")]
        others = [m for m in messages if m["role"] not in ("system", "developer")]
        return [{"role": "system", "content": "\n\n".join(told)}, *others]

    def _names_role(self, role: str) -> bool:
        """Whether the chat template has the role in quotes: `ipython` of Llama 3, for one."""
        templates = self._wrapped.chat_template
        for template in templates.values() if isinstance(templates, Mapping) else (templates,):
            if role and (f"'{role}'" in template or f'"{role}"' in template):
                return True
        return False

    # ids → text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are no UTF-8, at a cut character for instance, become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for, perhaps a part of a character; none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, U+FFFD standing for what is only a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")


class TokenBytes:
    """The exact bytes that each token of a backend stands for; none for an id without a token."""

    def __init__(self, backend: Backend):
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {i: token.content.encode() for i, token in added.items()}
        state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        steps = {step["type"] for step in state.get("decoders", [state]) if "type" in step}
        self.byte_level = "ByteLevel" in steps
        self._byte_fallback = "ByteFallback" in steps

    def __call__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            table = _byte_of_character()
            try:
                return bytes([table[character] for character in token])
            except KeyError:
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def load_backend(model: str, tokenizer: str | None = None) -> Backend:
    """The `tokenizers.Tokenizer` alone, without the seconds that importing transformers takes where that can be."""
    path = locate(tokenizer or model, weights=False)
    if path.is_file():
        return build_backend(GGUFFile(path))
    if (path / "tokenizer.json").exists():
        return Backend.from_file(str(path / "tokenizer.json"))
    return Tokenizer.load(model, tokenizer).backend


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself where that is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _plain_message(message: Mapping[str, Any], where: str, no_objects: list[str]) -> dict[str, Any]:
    """A message as templates expect it: content a string, calls' arguments an object, no key without a value.

    `no_objects` gains a place for each call whose arguments are something else.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role", where)
    plain = {key: value for key, value in message.items() if value not in (None, [], ())}
    content = message.get("content")
    if content is None and message["role"] != "assistant":  # which may only call tools
        raise InvalidRequest(f"{where}.content is required", f"{where}.content")
    plain["content"] = _plain_content(content, f"{where}.content")
    if "reasoning" in plain:  # vLLM's newer name, which older transformers do not know
        plain.setdefault("reasoning_content", plain["reasoning"])
    if (calls := plain.get("tool_calls")) is not None:
        if not isinstance(calls, list | tuple):
            raise InvalidRequest(f"{where}.tool_calls must be an array", f"{where}.tool_calls")
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls", no_objects) for call in calls]
    return plain


def _plain_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where} must be a string or an array of parts", where)
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"{where} holds a part of type {kind!r}; this model takes text only", where)
        texts.append(text)
    return "\n".join(texts)  # as vLLM joins them


def _plain_call(call: Any, where: str, no_objects: list[str]) -> dict[str, Any]:
    """OpenAI sends a call's arguments as JSON text; templates print them as an object.

    Text that is none becomes an empty one, as in vLLM: an answer that was cut off may be in the history for ever.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must hold objects with a function", where)
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        kind = type(arguments).__name__
        raise InvalidRequest(f"{where}: arguments must be JSON text, or an object, not {kind}", where)
    arguments = arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        no_objects.append(where)
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _load_folder(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds to import

    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((path / name).exists() for name in files):  # transformers would make up an empty tokenizer
        raise CheckpointError(f"{path} has no tokenizer: none of {', '.join(files)}; set tokenizer to one that has")
    try:
        wrapped = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # its loaders raise whatever the file provokes
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    if not isinstance(wrapped, PreTrainedTokenizerFast):
        raise CheckpointError(f"{path}: {type(wrapped).__name__} is not supported; a tokenizer.json is needed")
    return wrapped


def _wrap_gguf(file: GGUFFile) -> Any:
    from transformers import PreTrainedTokenizerFast

    template: Any = file.get("tokenizer.chat_template", str, "") or None
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if named and template:
        template = {"default": template, **named}
    return PreTrainedTokenizerFast(
        tokenizer_object=build_backend(file),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special_tokens(file),
    )
