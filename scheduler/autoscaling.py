"""How many worker groups a model should have: a pure decision over what the global scheduler knows of its load.

Load is counted in groups, so that it does not depend on how many there are:

    prefill = prefill work that comes, in seconds a second / utilization     tokens ÷ measured prefill speed
    backlog = prefill that waits or is under way / the time it may take      the larger of the TTFT target and a start
    kv      = KV tokens held and wanted / (a group's × kv_utilization)
    slots   = sequences running and waiting / (a group's × kv_utilization)
    need    = max(prefill + backlog, kv, slots)
    ttft    = a group more than there are, where requests wait and first tokens are late for as long as a start takes

A need of x asks for ceil(x / (1 + tolerance)) groups at least and for ceil(x / (1 - tolerance)) at most. The number of
groups rises to what was asked for at least throughout `upscale_delay`, and falls to what was asked for at most at any
time of `downscale_delay`; so while the need varies by no more than the tolerance, the number moves in one direction
only, and stops. (The windows are those of Kubernetes' horizontal pod autoscaler.)

A model may sleep: with `min_groups` 0 its last group goes once nobody has wanted the model for `idle_delay`, and the
next request wakes one at once.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from .errors import ConfigError

_WORK_SECONDS = 30.0  # over which the rate of work is averaged
_SAMPLE_SECONDS = 60.0  # how long a request's waiting is remembered
_MAX_SAMPLES = 512
_WISH_SECONDS = 1.0  # wishes that are closer together than this are kept as one


@dataclass(frozen=True)
class ScalingOptions:
    """Seconds, and shares of what a group can do."""

    min_groups: int = 1
    max_groups: int = 1
    ttft_target: float = 2.0  # to the first token
    utilization: float = 0.7  # of a group's time, in prefill
    kv_utilization: float = 0.8  # of a group's KV cache, and of its slots for sequences
    tolerance: float = 0.1
    upscale_delay: float = 3.0
    downscale_delay: float = 300.0
    idle_delay: float = 300.0  # without a request before the last group goes, where `min_groups` is 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_groups <= self.max_groups or self.max_groups < 1:
            raise ConfigError(f"min_groups ({self.min_groups}) must be from 0 to max_groups ({self.max_groups})")
        for name in ("utilization", "kv_utilization"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be over 0 and up to 1, not {getattr(self, name)}")
        if not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"tolerance must be from 0 to below 1, not {self.tolerance}")
        if self.ttft_target <= 0.0:
            raise ConfigError(f"ttft_target must be over 0 seconds, not {self.ttft_target}")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model is asked for, and what it has. Sums are over its groups."""

    num_groups: int = 0  # that serve
    num_queued: int = 0  # requests that wait for a group
    num_running: int = 0  # requests that groups have
    work_rate: float = 0.0  # seconds of prefill that come in a second
    backlog_seconds: float = 0.0  # of prefill that waits here or at the groups
    kv_tokens: float = 0.0  # held by running sequences, and what waiting ones will hold
    kv_tokens_per_group: float = math.inf
    seqs_per_group: float = math.inf
    ttft: float | None = None  # 90% of those that came lately to the groups there are were sooner; None: too few came
    wait: float | None = None  # of these, what they waited before their own prefill
    idle_seconds: float = 0.0  # since the last request left


@dataclass(slots=True)
class DemandMeter:
    """Keeps what `Demand` needs to know of the past of one model."""

    busy_at: float | None = None  # when a request was here last
    joined_at: float = -math.inf  # when a group joined last
    first_at: float = -math.inf  # when one joined while there was none
    _rate: float = 0.0
    _rate_at: float = 0.0
    _samples: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))

    def came(self, seconds: float, now: float) -> None:
        """A request with so many seconds of prefill."""
        self._rate = self.work_rate(now) + seconds / _WORK_SECONDS
        self._rate_at = self.busy_at = now

    def work_rate(self, now: float) -> float:
        return self._rate * math.exp(min(0.0, self._rate_at - now) / _WORK_SECONDS)

    def placed(self, arrived: float, wait: float, ttft: float, now: float) -> None:
        """A request went to a group. One that came before the last group did says nothing of those there are now."""
        self.busy_at = now
        if arrived >= self.joined_at:
            self._samples.append((now, ttft, wait))

    @property
    def has_served(self) -> bool:
        """There was a group."""
        return self.joined_at > -math.inf

    def joined(self, now: float, first: bool) -> None:
        self.joined_at = now
        if first:
            self.first_at = now
        self._samples.clear()

    def lateness(self, now: float) -> tuple[float | None, float | None]:
        """The 90th percentiles of TTFT and of waiting; None while fewer than ten have come."""
        while self._samples and self._samples[0][0] < now - _SAMPLE_SECONDS:
            self._samples.popleft()
        if len(self._samples) < 10:
            return None, None
        rank = int(0.9 * (len(self._samples) - 1))
        return sorted(s[1] for s in self._samples)[rank], sorted(s[2] for s in self._samples)[rank]


@dataclass(frozen=True, slots=True)
class Decision:
    """How many groups, and why: the need, in groups, and which kind of load it comes from."""

    num_groups: int
    need: float
    reason: str


@dataclass(slots=True)
class Scaler:
    """Decides for one model. Time is what the caller says it is, and never goes back."""

    options: ScalingOptions
    startup_seconds: float = 30.0  # from a decision until its group serves; learned
    _wishes: deque[tuple[float, int, int]] = field(default_factory=deque)  # time, groups at least, groups at most
    _began: float | None = None
    _raised: tuple[float, int] | None = None  # when more groups were asked for, and how many serve once they are there
    _late_seconds: float = 0.0  # that first tokens have been late, less those that they have not
    _late: tuple[int, float] | None = None  # so many groups were too few for this rate of work
    _decided_at: float = 0.0

    def need(self, demand: Demand) -> tuple[float, str]:
        """In groups, but for what late first tokens say."""
        options = self.options
        horizon = max(options.ttft_target, self.startup_seconds)  # what is over before a group starts needs none
        prefill = demand.work_rate / options.utilization + demand.backlog_seconds / horizon
        kv = demand.kv_tokens / (demand.kv_tokens_per_group * options.kv_utilization)
        slots = (demand.num_queued + demand.num_running) / (demand.seqs_per_group * options.kv_utilization)
        return max((prefill, "prefill"), (kv, "kv"), (slots, "slots"))

    def decide(self, demand: Demand, target: int, now: float) -> Decision:
        """From `target` groups, those asked for so far. To be called every second or so."""
        options = self.options
        self._learn_startup(demand, now)
        need, reason = self.need(demand)
        low = math.ceil(need / (1.0 + options.tolerance) - 1e-9)
        high = max(low, math.ceil(need / (1.0 - options.tolerance) - 1e-9))
        if self._stays_late(demand, target, now):
            self._late = demand.num_groups, demand.work_rate
            if demand.num_groups + 1 > low:
                low, reason = demand.num_groups + 1, "ttft"
        if self._late is not None:
            num, rate = self._late
            if demand.work_rate >= (1.0 - options.tolerance) * rate:
                high = max(high, num + 1)
            else:
                self._late = None
        low, high = self._bound(low), self._bound(max(low, high))
        self._wish(low, high, now)
        number = self._bound(target)
        if target == 0 and options.min_groups == 0:
            number = min(1, demand.num_queued)
            reason = "wake" if number else "idle"
        elif (least := self._least(now)) > number:
            number = least
        elif (most := self._most(now)) < number:
            number = most
        elif number == 1 and options.min_groups == 0 and self._is_idle(demand):
            number, reason = 0, "idle"
        if number > target:
            self._raised = now, number
            self._late_seconds = 0.0
        elif number < target:
            self._raised = None
        return Decision(number, need, reason)

    def _bound(self, number: int) -> int:
        """Nobody goes to sleep by a small need: for that `_is_idle` is there."""
        return max(1, self.options.min_groups, min(self.options.max_groups, number))

    def _stays_late(self, demand: Demand, target: int, now: float) -> bool:
        """First tokens are late, mostly for having waited, and a group that started when that began would be here.

        What is left of a burst, or waited for the first group, is over sooner. Groups on their way are waited for.
        """
        seconds, self._decided_at = now - self._decided_at, now
        late = self.options.ttft_target * (1.0 + self.options.tolerance)
        if demand.ttft is None or demand.wait is None or demand.num_groups < target:
            self._late_seconds = 0.0
        elif demand.ttft <= late or demand.wait <= 0.5 * demand.ttft:
            self._late_seconds = max(0.0, self._late_seconds - seconds)
        elif demand.num_queued:
            self._late_seconds += min(seconds, 2 * _WISH_SECONDS)
        return self._late_seconds >= self.startup_seconds

    def _is_idle(self, demand: Demand) -> bool:
        return not demand.num_queued and not demand.num_running and demand.idle_seconds >= self.options.idle_delay

    def _learn_startup(self, demand: Demand, now: float) -> None:
        if self._raised is not None and demand.num_groups >= self._raised[1]:
            self.startup_seconds += 0.5 * (now - self._raised[0] - self.startup_seconds)
            self._raised = None

    # -- the windows --------------------------------------------------------------------------------------------------

    def _wish(self, low: int, high: int, now: float) -> None:
        if self._began is None:
            self._began = now
        keep = max(self.options.upscale_delay, self.options.downscale_delay)
        # one that is older than the window still says what was asked for at its beginning
        while len(self._wishes) > 1 and self._wishes[1][0] <= now - keep:
            self._wishes.popleft()
        if self._wishes and now - self._wishes[-1][0] < _WISH_SECONDS and self._wishes[-1][0] > self._began:
            at, last_low, last_high = self._wishes.pop()
            low, high = min(low, last_low), max(high, last_high)  # neither way sooner for being asked more often
            now = at
        self._wishes.append((now, low, high))

    def _least(self, now: float) -> int:
        """What was asked for at least throughout the last `upscale_delay` seconds; 0 before there were so many."""
        return min((low for _, low, _ in self._within(self.options.upscale_delay, now)), default=0)

    def _most(self, now: float) -> int:
        """What was asked for at most in the last `downscale_delay` seconds; all of it before there were so many."""
        window = self._within(self.options.downscale_delay, now)
        return max((high for _, _, high in window), default=self.options.max_groups)

    def _within(self, seconds: float, now: float) -> list[tuple[float, int, int]]:
        """What was asked for in the last so many seconds; nothing before there were so many."""
        assert self._began is not None
        if now - self._began < seconds:
            return []
        wishes = list(self._wishes)
        ends = [*(w[0] for w in wishes[1:]), math.inf]  # each holds until the next
        return [w for w, end in zip(wishes, ends, strict=True) if end > now - seconds]

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        times = [w[0] for w in self._wishes]
        assert times == sorted(times)
        assert all(self._bound(low) == low <= high == self._bound(high) for _, low, high in self._wishes)
