"""The simulator with groups that come and go: the decisions of `scheduler/autoscaling.py` on a trace.

A group that is asked for serves `startup_seconds` later. One that goes takes no more requests and hands over what it
has; what was computed there is computed again, as after a loss.
"""

from dataclasses import dataclass, field

from ..autoscaling import Decision, Scaler, ScalingOptions
from ..dispatcher import Dispatcher
from .simulator import MODEL, Simulation

_DECIDE_SECONDS = 1.0


@dataclass(slots=True)
class ScalingSimulation(Simulation):
    """`num_groups` are there at the start; `decisions` are those that changed something, with their times."""

    options: ScalingOptions = field(default_factory=ScalingOptions)
    startup_seconds: float = 30.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    group_seconds: float = 0.0  # that groups were there or on their way: what they cost
    _target: int = 0
    _num_made: int = 0
    _scaler: Scaler = field(init=False)

    def __post_init__(self) -> None:
        self._scaler = Scaler(self.options)
        self._target = self._num_made = self.num_groups
        self._at(0.0, self._decide)

    def _decide(self) -> None:
        assert isinstance(self.router, Dispatcher)
        decision = self._scaler.decide(self.router.demand(MODEL, self.now), self._target, self.now)
        self._scaler.check_integrity()
        if decision.num_groups != self._target:
            self.decisions.append((self.now, decision))
        for _ in range(decision.num_groups - self._target):
            self._at(self.now + self.startup_seconds, self._arrived, self._num_made)
            self._num_made += 1
        self._target = decision.num_groups
        self._leave()
        self.group_seconds += _DECIDE_SECONDS * max(self._target, len(self.groups))
        self._at(self.now + _DECIDE_SECONDS, self._decide)

    def _arrived(self, number: int) -> None:
        if len(self.groups) < self._target:  # else nobody wants it any more
            self._join(number, self.report_seconds)
            self._dispatch()

    def _leave(self) -> None:
        """Those with the least to do go first."""
        while len(self.groups) > self._target:
            group_id = min(self.groups, key=lambda g: (len(self.groups[g].sequences()), g))
            group = self.groups.pop(group_id)
            self._busy_seconds += group.busy_seconds
            self.registered.discard(group_id)
            self.router.remove_group(group_id)
            for sequence in group.sequences():
                self._at(self.now + self.retry_seconds, self._retry, sequence.request.request_id)
