"""Processes of a served cluster die, hang and are cut off while streams run; each must be what it is undisturbed.

    python tests/bench/chaos.py MODEL [--faults 200] [--hosts 2] [--groups 4] [--ranks 2] [--seed 0]

The hosts are network namespaces (`tests/hosts.py`), each with a Ray of its own and half of the groups, of two ranks
each. Clients stream answers, greedy and sampled, one after the other. Which faults come, in which order and to whom, is
the seed's choice (`tests/faults.py` has the deck); --kind names one instead, such as "Rank SIGKILL".

Printed: for each kind of fault how long the stream that waited longest went without a token (median, 95th percentile),
and when all groups were there again; what was wrong (streams that broke off, said something else than undisturbed, or
hung), and what is left behind: blocks, actors, placement groups, processes, shared files. Ends with 1 if anything was
wrong.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from faults import DECK, Chaos, Clients, Cluster, deal, leaks
from hosts import Network
from steady_load import answer

JOBS = [
    {"prompt": "One, two,", "temperature": 0, "max_tokens": 200},
    {
        "prompt": "The history of the lighthouse begins",
        "temperature": 0.8,
        "seed": 7,
        "presence_penalty": 0.5,
        "max_tokens": 200,
    },
    {"prompt": "A recipe for bread:", "temperature": 1.0, "seed": 11, "top_p": 0.9, "n": 2, "max_tokens": 150},
    {
        "prompt": "Dear Ms. Baker,",
        "temperature": 0.7,
        "seed": 3,
        "stop": ["Sincerely"],
        "logprobs": 1,
        "max_tokens": 200,
    },
    {"prompt": "Once upon a time " * 60, "temperature": 0, "max_tokens": 60, "min_tokens": 50},
]


def percentiles(values):
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"median {statistics.median(ordered):.2f} s, 95% {high:.2f} s, longest {ordered[-1]:.2f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of a group")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--kind", action="append", choices=sorted(set(DECK)), help="of faults; may be repeated")
    parser.add_argument("--settle", type=float, default=0.5, metavar="S", help="seconds between faults")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="no fault begins after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    names = deal(args.faults, rng, args.kind or DECK)
    with Network(args.hosts) as network, tempfile.TemporaryDirectory() as folder:
        engine = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory": "256MiB"}
        cluster = Cluster(network, Path(folder), args.model.resolve(), args.groups, args.ranks, engine)
        cluster.wait_up()
        expected = [answer(cluster.url, {"model": "chaos", **job}) for job in JOBS]
        before = cluster.state()
        clients = Clients(cluster.url, JOBS, expected, args.clients, args.seed)
        began = time.monotonic()
        chaos = Chaos(cluster, clients, rng)
        try:
            chaos.run(names, args.settle, args.limit)
        except AssertionError as error:
            clients.wrong.append(f"given up: {error}")
        took = time.monotonic() - began
        clients.finish()
        left = leaks(cluster, before)
        resumed, moved = cluster.metric("request_resumed_total"), cluster.metric("request_moved_total")
    by_kind = defaultdict(list)
    for fault in clients.faults:
        if fault.waits:
            by_kind[fault.name].append(fault)
    for name, faults in sorted(by_kind.items()):
        waits = [max(f.waits.values()) for f in faults]
        print(f"{name}: {len(faults)} faults, the stream that waited longest: {percentiles(waits)}")
        if whole := [f.whole_after for f in faults if f.whole_after]:
            print(f"    all groups there again after: {percentiles(whole)}")
    print(
        f"{chaos.numbers} faults in {took:.0f} s; {clients.num_done} answers, {clients.num_again} asked again as their "
        f"ingress had died, {resumed:.0f} resumptions and {moved:.0f} moves since the last ingress came; "
        f"{len(clients.wrong)} wrong; left: {left or 'nothing'}"
    )
    for line in clients.wrong:
        print(line)
    sys.exit(bool(clients.wrong or left))


if __name__ == "__main__":
    main()
