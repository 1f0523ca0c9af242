"""Engines over worker groups for tests: the same requests, one rank or many, must give the same tokens."""

import os
from types import SimpleNamespace

from pagedray.scheduler.request import Request, SamplingParams
from pagedray.workers.config import EngineConfig
from pagedray.workers.engine import Engine
from pagedray.workers.executor import GroupExecutor

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, seed=0, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(
    temperature=1.0, max_tokens=MAX_TOKENS, seed=7, ignore_eos=True, presence_penalty=0.5, repetition_penalty=1.2
)


def config_for(model, **settings):
    settings = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 256, "cpu_threads": 1, **settings}
    return EngineConfig.from_kwargs(model=str(model), **settings)


def engine_over(executor, config, num_blocks=None, **settings):
    """An engine that schedules otherwise, over ranks that have started already."""
    from dataclasses import replace

    config = replace(config, **settings)
    num_blocks = num_blocks or executor.num_blocks
    seen = SimpleNamespace(
        submit=executor.submit,
        collect=executor.collect,
        model_config=executor.model_config,
        num_blocks=num_blocks,
        max_model_len=min(executor.max_model_len, num_blocks * config.block_size),
        max_in_flight=executor.max_in_flight,
    )
    return Engine(config, executor=seen)


def run(engine, requests):
    """(token ids, logprobs, cached tokens) of each request; the books are checked after every step."""
    answers = {r.request_id: ([], [], [0]) for r in requests}
    for request in requests:
        engine.add_request(request)
    most_in_flight = 0
    while engine.has_unfinished():
        for output in engine.step():
            tokens, logprobs, cached = answers[output.request_id]
            tokens += output.token_ids
            logprobs += [p.logprob for p in output.logprobs]
            cached[0] = output.num_cached_tokens
        most_in_flight = max(most_in_flight, engine.scheduler.num_in_flight)
        engine.scheduler.check_integrity()
    engine.step()  # tells the ranks what to forget
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    run.most_in_flight = most_in_flight
    return list(answers.values())


def greedy(prompts):
    return [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]


def sampled(prompts):
    return [Request(str(i), prompt, SAMPLED, index=i) for i, prompt in enumerate(prompts)]


def rank_pids(executor):
    """Process ids of the ranks beside the leader, in order."""
    return [handle.process.pid for handle in executor._members._handles.values()]


def is_running(pid):
    """Whether a process lives; one that has ended and waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def traces():
    """What a group could leave behind: names in shared memory, abstract sockets."""
    with open("/proc/net/unix") as sockets:
        ours = {line.split()[-1] for line in sockets if "@pagedray-" in line}
    return {n for n in os.listdir("/dev/shm") if "pagedray" in n} | ours


def group(config, **arguments):
    return GroupExecutor(config, start_timeout=120, **arguments)
