"""What a step of a worker group takes, as a function of what is in it; and how to learn that from steps that ran.

    seconds = base + token·n + attention·n·context + sequence·b + kv·context_b

with n prompt tokens computed over an average `context` of tokens before them, and b sequences that decode over
`context_b` tokens in all. It is linear in its five coefficients, so least squares fits them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """What is in a step. `prefill_context` is Σ (tokens computed × tokens before each): what attention reads."""

    prefill_tokens: int
    prefill_context: float
    num_decodes: int
    decode_context: int

    def features(self) -> tuple[float, float, float, float, float]:
        return 1.0, self.prefill_tokens, self.prefill_context, self.num_decodes, self.decode_context


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step, a prompt token, the same per token of context, a decoding sequence, a token that it reads."""

    base: float = 5e-3
    token: float = 1e-4
    attention: float = 0.0
    sequence: float = 1e-4
    kv: float = 0.0

    def step_seconds(self, work: StepWork) -> float:
        return sum(c * x for c, x in zip(self.coefficients(), work.features(), strict=True))

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        """Computing `num_tokens` after `context` others, the steps' base left out."""
        return num_tokens * (self.token + self.attention * (context + 0.5 * num_tokens))

    def chunked_prefill_seconds(
        self, num_tokens: int, context: int, chunk: int, num_decodes: int, decode_context: int
    ) -> float:
        """The same in chunks, each of which is a step that brings along what decodes."""
        beside = self.base + self.sequence * num_decodes + self.kv * decode_context
        return num_tokens * (self.token + self.attention * (context + 0.5 * num_tokens) + beside / chunk)

    def decode_seconds(self, num_decodes: int, context: int) -> float:
        """What sequences that decode add to each step."""
        return self.base + self.sequence * num_decodes + self.kv * context

    def coefficients(self) -> tuple[float, float, float, float, float]:
        return self.base, self.token, self.attention, self.sequence, self.kv

    def slower(self, factor: float) -> "CostModel":
        return CostModel(*(factor * c for c in self.coefficients()))


class CostFitter:
    """Recursive least squares with forgetting: a coefficient follows what the last few hundred steps took.

    Starts from a guess that a few steps outweigh. Coefficients are kept from going negative: a negative price of
    something would draw requests to it.
    """

    def __init__(self, guess: CostModel | None = None, forgetting: float = 0.998):
        self._forgetting = forgetting
        # in these units the features are of the same size, which keeps the arithmetic well-conditioned
        self._units = (1.0, 1e-3, 1e-7, 1e-1, 1e-5)
        guess = guess or CostModel()
        self._weights = [c / u for c, u in zip(guess.coefficients(), self._units, strict=True)]
        self._covariance = [[float(i == j) for j in range(5)] for i in range(5)]
        self.num_steps = 0

    def add(self, work: StepWork, seconds: float) -> None:
        x = [f * u for f, u in zip(work.features(), self._units, strict=True)]
        p = self._covariance
        px = [sum(row[j] * x[j] for j in range(5)) for row in p]
        gain = 1.0 / (self._forgetting + sum(x[i] * px[i] for i in range(5)))
        error = seconds - sum(w * f for w, f in zip(self._weights, x, strict=True))
        self._weights = [w + gain * error * k for w, k in zip(self._weights, px, strict=True)]
        trace = sum(p[i][i] for i in range(5))
        # without new evidence in a direction forgetting would let its covariance grow for ever
        forget = self._forgetting if trace < 100.0 else 1.0
        self._covariance = [[(p[i][j] - gain * px[i] * px[j]) / forget for j in range(5)] for i in range(5)]
        self.num_steps += 1

    @property
    def model(self) -> CostModel:
        return CostModel(*(max(0.0, w * u) for w, u in zip(self._weights, self._units, strict=True)))


def fit(samples: Iterable[tuple[StepWork, float]]) -> CostModel:
    """Least squares over (work, seconds), relative errors weighted equally, coefficients at least 0.

    A coefficient that comes out negative is fixed at 0 and the others are fitted again.
    """
    rows = [(work.features(), seconds) for work, seconds in samples]
    active = [i for i in range(5) if any(x[i] for x, _ in rows)]
    while True:
        scale = {i: max(abs(x[i]) for x, _ in rows) for i in active}
        solution = _solve(
            [[sum(x[i] * x[j] / (scale[i] * scale[j] * y * y) for x, y in rows) for j in active] for i in active],
            [sum(x[i] / (scale[i] * y) for x, y in rows) for i in active],
        )
        worst = min(range(len(active)), key=lambda k: solution[k])
        if solution[worst] >= 0:
            found = {i: solution[k] / scale[i] for k, i in enumerate(active)}
            return CostModel(*(found.get(i, 0.0) for i in range(5)))
        del active[worst]


def _solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Gauss with pivots; a direction without evidence gets 0."""
    n = len(vector)
    rows = [[*matrix[i], vector[i]] for i in range(n)]
    for column in range(n):
        pivot = max(range(column, n), key=lambda r: abs(rows[r][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-12:
            rows[column] = [float(j == column) for j in range(n)] + [0.0]
        lead = rows[column][column]
        rows[column] = [v / lead for v in rows[column]]
        for r in range(n):
            if r != column and rows[r][column]:
                factor = rows[r][column]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[column], strict=True)]
    return [row[n] for row in rows]
