"""One growing list of tokens and the KV blocks that hold them."""

from .block_pool import BlockHash, extend_hashes, root_hash
from .request import Request


class Sequence:
    """A request in a worker group. There are no phases: tokens exist, `num_computed_tokens` of them have KV.

    Prefill, a chunk of it, decode, a prefix hit and recomputing after a preemption are all tokens catching up.
    """

    __slots__ = (
        "request",
        "seq_id",
        "key",
        "token_ids",
        "max_len",
        "num_computed_tokens",
        "num_cached_tokens",
        "fetched",
        "block_ids",
        "block_hashes",
        "awaits_token",
        "num_sent_tokens",
        "num_sent_blocks",
        "last_step",
        "num_in_flight",
    )

    def __init__(self, request: Request, seq_id: int, key: tuple[float, int], max_len: int):
        self.request = request
        self.seq_id = seq_id
        self.key = key  # who goes first: smaller
        self.token_ids = list(request.token_ids)
        self.max_len = max_len  # tokens, prompt included, at which it ends
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
        self.fetched: tuple[int, bool] | None = None  # where a fetch that it ordered begins, in blocks; from its node?
        self.block_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []  # of full blocks of known tokens
        self.awaits_token = False  # a step that draws its next token is in flight
        self.num_sent_tokens = 0  # what the ranks know of it
        self.num_sent_blocks = 0
        self.last_step = -1  # the last step it had a share in
        self.num_in_flight = 0  # steps that it has a share in and whose results are not in

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def reads_prompt(self) -> bool:
        """What its prompt's positions tell is still wanted: it goes out with the first token."""
        return self.request.reads_prompt and not self.num_output_tokens

    def extend_hashes(self, block_size: int) -> None:
        """Hash the full blocks that have come about since the last call."""
        if len(self.block_hashes) < len(self.token_ids) // block_size:
            root = root_hash(self.request.model, self.request.cache_salt)
            extend_hashes(self.block_hashes, self.token_ids, block_size, root)
