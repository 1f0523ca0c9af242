"""What the leader of a worker group and its ranks say to each other, beside `StepPlan` and `StepResult`.

rank                leader
Hello          ──▶          who and where it is
               ◀──  Assignment
Loading, Loaded──▶          how many blocks it can hold
               ◀──  Capacity   the least of all
Ready          ──▶
               ◀──  Serve, then step plans, in the end Stop
Failed         ──▶          what went wrong, at any time
               ◀──  Abort      another rank is lost
"""

from dataclasses import dataclass

from .config import EngineConfig, ModelConfig
from .parallel import Peer, Topology
from .sampler import GrammarBackend


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group's leader listens, and the key that shows who belongs to it. Lives as long as the group."""

    host: str
    port: int
    key: bytes

    def __repr__(self) -> str:  # the key stays out of logs
        return f"GroupAddress({self.host}:{self.port})"


@dataclass(frozen=True, slots=True)
class Hello:
    rank: int
    peer: Peer


@dataclass(frozen=True, slots=True)
class Assignment:
    config: EngineConfig
    model: ModelConfig
    topology: Topology
    start_timeout: float
    grammar_backend: GrammarBackend | None


@dataclass(frozen=True, slots=True)
class Loading:
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Loaded:
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Capacity:
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Serve:
    silence: float  # seconds without a word after which a peer is taken for lost


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Abort:
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception
