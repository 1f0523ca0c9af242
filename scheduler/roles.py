"""Prefill and decode on groups of their own: which groups a request may go to (DistServe, Splitwise).

A long prompt in a group's steps holds up all that decode there. Where a model has groups of both kinds, a prompt goes
to a prefill group, which gives the request away once a store has the prompt's blocks; a decode group fetches them and
goes on. A prompt of which little is missing is computed by a decode group: that costs less than giving it away (Dynamo
does the same). A mixed group takes either. Where no group of the right kind is alive, any takes it and keeps it.
"""

from collections.abc import Sequence

ROLES = ("mixed", "prefill", "decode")


class Roles:
    """The groups of one model by role, as masks of their bits in the prefix index."""

    def __init__(self) -> None:
        self.everybody = 0
        self._of = dict.fromkeys(ROLES, 0)
        self._fetching = 0  # of those that go on with what others began
        self._local: dict[int, int] = {}  # missing blocks → decode groups that compute up to so many themselves

    def add(self, bit: int, role: str, fetches: bool, local_blocks: int = 0) -> None:
        self.everybody |= bit
        self._of[role] |= bit
        if role != "prefill" and fetches:
            self._fetching |= bit
        if role == "decode":
            self._local[local_blocks] = self._local.get(local_blocks, 0) | bit

    def remove(self, bit: int) -> None:
        self.everybody &= ~bit
        self._fetching &= ~bit
        self._of = {role: mask & ~bit for role, mask in self._of.items()}
        self._local = {blocks: mask & ~bit for blocks, mask in self._local.items() if mask & ~bit}

    def fit(self, goes_on: bool, num_blocks: int, levels: Sequence[tuple[int, int]], num_stored: int) -> int:
        """Which groups may have a request of so many blocks, of which the stores have `num_stored`.

        `goes_on`: it has made tokens already. `levels`: (blocks, groups that hold so many).
        """
        mixed = self._of["mixed"]
        if mixed == self.everybody:
            return self.everybody
        begins, ends = self._of["prefill"] | mixed, self._of["decode"] | mixed
        if goes_on or any(num_blocks <= local for local in self._local):
            return ends or self.everybody
        if not begins:
            return self.everybody
        for local, groups in self._local.items():
            for held, holders in [*levels, (num_stored, self._fetching)]:
                if num_blocks - held <= local:
                    begins |= groups & holders
        return begins

    def hands_over(self, bit: int) -> bool:
        """Whether this group gives away what it began: there is one alive that can go on."""
        return bool(self._of["prefill"] & bit and self._fetching)
