"""PagedRay against vLLM, llama.cpp and transformers: the same weights, two threads, turn by turn in one run.

    python tests/bench/peers.py [--peers vllm,llama.cpp] [--workloads W1,W4] [--rounds 3]

Peers are installed once, each into an environment of its own below --folder (llama.cpp compiles for some 12 minutes;
`--setup` does no more than that). Contestants alternate (A B A B); whoever has no turn stands still. Memory bandwidth
is read between the turns. Every turn is appended to --results, and the table is made of all turns there that were
measured at the commit measured last: so a long run may be split over several calls. `--show` only prints the table.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison.contestants import Contestant, Place, contestant
from comparison.environments import RECIPES, Environment, Unavailable, prepare
from comparison.machine import Machine
from comparison.models import Models
from comparison.table import Turn, append_turn, markdown, read_turns
from comparison.workloads import BANDWIDTH, WORKLOADS, Workload

from pagedray.cluster import demo_model


def say(line: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {line}", file=sys.stderr, flush=True)


def main() -> None:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or those who stand still would do so for ever
    results = args.results or args.folder / "results.jsonl"
    if not args.show:
        environments, missing, notes = set_up(args)
        # As many cores as threads, for everybody: what is started here inherits it.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
        models = Models(args.folder / "models", args.model or demo_model.fetch(progress=say), say)
        place = Place(args.folder, models, environments, args.threads)
        chosen = [WORKLOADS[name] for name in args.workloads]
        if args.setup:
            make_models(chosen, place)
            return
        machine = Machine(args.threads)
        pool: dict[tuple, Contestant] = {}
        try:
            # neighbors share processes, which take up to minutes to start
            for workload in sorted(chosen, key=lambda w: (w.model, w.http)):
                run(workload, args, place, machine, missing, results, pool)
        finally:
            stop_all(pool)
        for note in notes:
            print(f"Note: {note}.\n")
    turns = read_turns(results)
    if not turns:
        sys.exit(f"{results} holds no turns yet")
    commit = turns[-1].commit
    print(f"Commit {commit}, {turns[-1].time[:10]}; medians (lowest-highest), ratios of medians.\n")
    print(markdown(t for t in turns if t.commit == commit))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    def names(known: Sequence[str]):
        def read(text: str) -> list[str]:
            chosen = [name for name in text.split(",") if name]
            if wrong := [name for name in chosen if name not in known]:
                raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(known)}")
            return chosen

        return read

    about, _, more = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=about, epilog=more, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=names(list(RECIPES)), default=list(RECIPES), help="besides PagedRay (all)")
    parser.add_argument("--workloads", type=names(list(WORKLOADS)), default=list(WORKLOADS), help="(all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant (3)")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant (2)")
    parser.add_argument("--model", type=Path, help="the demo model's .gguf, where it is not in the cache")
    folder = demo_model.cache_folder().parent / "peers"
    parser.add_argument("--folder", type=Path, default=folder, help=f"for environments and models ({folder})")
    parser.add_argument("--results", type=Path, help="file of turns, one a line (FOLDER/results.jsonl)")
    parser.add_argument(
        "--pip-args", type=shlex.split, default=[], help="for pip, such as where CPU builds of torch are"
    )
    parser.add_argument("--setup", action="store_true", help="install the peers and make the models, no more")
    parser.add_argument("--show", action="store_true", help="print the table of what was measured, no more")
    return parser.parse_args(argv)


def set_up(args: argparse.Namespace) -> tuple[dict[str, Environment], dict[str, str], list[str]]:
    """The environments by peer, why others are missing, and what a reader must know."""
    environments: dict[str, Environment] = {}
    missing: dict[str, str] = {}
    for peer in args.peers:
        try:
            environments[peer] = prepare(peer, args.folder, args.pip_args, say)
        except Unavailable as error:
            missing[peer] = str(error)
            say(f"{peer} is not measured: {error}")
    return environments, missing, [note for e in environments.values() for note in e.notes]


def make_models(workloads: Sequence[Workload], place: Place) -> None:
    for workload in workloads:
        for name in workload.contestants:
            peer = name.split(":")[0]
            try:
                if peer == "pagedray" or peer in place.environments:
                    contestant(name, workload, place)
            except Unavailable as error:
                say(f"{name}: {error}")


def run(
    workload: Workload,
    args: argparse.Namespace,
    place: Place,
    machine: Machine,
    missing: dict[str, str],
    results: Path,
    pool: dict[tuple, Contestant],
) -> None:
    """All rounds of one workload. Whoever fails is recorded with the reason, and has no further turn.

    `pool` has the processes of earlier workloads; those that this one needs are used, the others stopped.
    """
    commit = current_commit()
    first = 1 + max((t.round for t in read_turns(results) if t.workload == workload.name), default=0)
    standing: dict[str, Contestant] = {}

    def record(name: str, **what) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        append_turn(results, Turn(workload.name, name, commit, time, **what))

    def give_up(name: str, reason: str) -> None:
        say(f"{workload.name} {name} is not measured: {reason}")
        record(name, unavailable=reason)
        if name in standing:
            who = standing.pop(name)
            del pool[who.key]
            who.stop()

    for name in workload.contestants:
        peer = name.split(":")[0]
        if peer in missing:
            give_up(name, missing[peer])
        elif peer == "pagedray" or peer in place.environments:
            try:
                who = contestant(name, workload, place)
                standing[name] = pool.setdefault(who.key, who)
            except Unavailable as error:
                give_up(name, str(error))
    needed = {who.key for who in standing.values()}
    stop_all(pool, [key for key in pool if key not in needed])
    for name, who in list(standing.items()):
        try:
            who.prepare()
        except Unavailable as error:
            give_up(name, str(error))
    for round_ in range(first, first + args.rounds):
        for name, who in list(standing.items()):
            try:
                bandwidth, figures = take_turn(who, workload, round_, machine)
            except Unavailable as error:
                give_up(name, str(error))
                continue
            if figures.get("median_tpot_ms") and ":bf16" in name:
                weights = (place.models.huggingface(workload.model) / "model.safetensors").stat().st_size
                figures[BANDWIDTH] = weights / (figures["median_tpot_ms"] / 1000) / bandwidth
            record(name, round=round_, bandwidth=bandwidth, figures=figures)
            say(
                f"{workload.name} round {round_} {name}: {figures[workload.metric]:.1f} tokens/s, "
                f"memory {bandwidth / 1e9:.1f} GB/s"
            )


def take_turn(who: Contestant, workload: Workload, round_: int, machine: Machine) -> tuple[float, dict[str, Any]]:
    """The memory's bandwidth around the turn, and the figures. All others stand still meanwhile."""
    before = machine.bandwidth()
    who.resume()
    who.measure(workload, workload.warm_up())
    figures = who.measure(workload, workload.draw(round_))
    who.pause()
    return (before + machine.bandwidth()) / 2, figures


def stop_all(pool: dict[tuple, Contestant], keys: Sequence[tuple] | None = None) -> None:
    """Those of `keys`, by default all; they end at the same time."""
    leaving = [pool.pop(key) for key in list(pool if keys is None else keys)]
    for who in leaving:
        who.ask_to_stop()
    for who in leaving:
        who.stop()


def current_commit() -> str:
    """With a + where files differ from it; "unknown" outside a repository."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    done = subprocess.run([*git, "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
