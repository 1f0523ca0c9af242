"""What a model thinks before it answers: <think>…</think>, as DeepSeek-R1, Qwen3 and others write it."""

from collections.abc import Iterator

from .tool_calls import PARSERS, overlap

# The settings that say how a model's text is read, and their values. Both names of reasoning are this one way.
READERS = {"tool_call_parser": tuple(PARSERS), "reasoning_parser": ("deepseek_r1", "qwen3")}


class ReasoningParser:
    """Splits a text as it comes into pairs (is it reasoning?, text).

    `inside`: the prompt has opened the thought already, as DeepSeek-R1's template does.
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, inside: bool):
        self._inside = inside
        self._begun = inside
        self._trims = False  # the newlines between the thought and the answer belong to neither
        self._held = ""

    def add(self, text: str) -> list[tuple[bool, str]]:
        self._held += text
        return list(self._read(final=False))

    def finish(self) -> list[tuple[bool, str]]:
        return list(self._read(final=True))

    def _read(self, final: bool) -> Iterator[tuple[bool, str]]:
        if not self._begun:  # a thought stands at the beginning, or there is none
            start = self._held.lstrip()
            if start.startswith(self.OPEN):
                self._inside, self._held = True, start.removeprefix(self.OPEN)
            elif self.OPEN.startswith(start) and not final:
                return
            self._begun = True
        if self._inside:
            thought, closed, rest = self._held.partition(self.CLOSE)
            if closed:
                self._inside, self._held, self._trims = False, rest, True
                if thought:
                    yield True, thought
            else:
                sure = len(self._held) if final else len(self._held) - overlap(self._held, self.CLOSE)
                if sure:
                    yield True, self._held[:sure]
                self._held = self._held[sure:]
        if not self._inside and self._trims:
            self._held = self._held.lstrip("\n")
            self._trims = not self._held
        if not self._inside and self._held:
            text, self._held = self._held, ""
            yield False, text
