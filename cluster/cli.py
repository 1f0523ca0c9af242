"""The command line. Only the flags live here; what the commands do is in the modules they call."""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..scheduler.errors import ConfigError, InvalidRequest, PagedRayError
from ..scheduler.names import nearest
from ..workers.config import IDLE_SETTINGS
from .text.reasoning import READERS


def _numbers(text: str) -> list[float]:
    """A list in a flag: 2,1 or 0.5,1."""
    return [int(part) if part.strip().isdigit() else float(part) for part in text.split(",")]


_numbers.__name__ = "N,N"  # as --help and argparse's errors show it


def _json(text: str) -> Any:
    return json.loads(text)


_json.__name__ = "JSON"


def _literal(text: str) -> Any:
    """A number, JSON, or else a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_ENGINE_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "--dtype": (str, "auto, bfloat16 or float32"),
    "--quantization": (str, "of weights: auto (as the files have them), int8, fp8 (GPUs), or none (in --dtype)"),
    "--kv-cache-dtype": (str, "of KV: auto (as --dtype), int8 (CPUs; about half of bf16) or fp8 (GPUs; unscaled e4m3)"),
    "--max-model-len": (int, "prompt and output, in tokens"),
    "--max-num-seqs": (int, "sequences in a step"),
    "--max-num-batched-tokens": (int, "tokens in a step: the prefill chunk"),
    "--block-size": (int, "tokens in a KV block"),
    "--kv-cache-memory": (str, "of a worker group: bytes, or such as 1GiB (also --kv-cache-memory-bytes)"),
    "--num-gpu-blocks-override": (int, "KV blocks, instead of --kv-cache-memory"),
    "--tensor-parallel-size": (int, "ranks that split each layer"),
    "--pipeline-parallel-size": (int, "ranks that split the layers"),
    "--tensor-parallel-weights": (_numbers, "what each rank of a layer takes, such as 2,1 (default: equal shares)"),
    "--pipeline-stage-layers": (_numbers, "layers of each stage, such as 16,14 (default: balanced by measured time)"),
    "--seed": (int, "of requests that bring none, offline"),
    "--device": (str, "auto, cuda (Ray gives each rank a GPU) or cpu"),
    "--gpu-memory-utilization": (float, "share of a GPU that weights, activations and KV may take"),
    "--cpu-threads": (int, "of a rank"),
    "--kv-transfer-config": (_json, "sharing KV between worker groups, such as '{\"kv_connector\": null}' for none"),
    "--tokenizer": (str, "where it is not the model's own"),
    "--generation-config": (
        str,
        "where a request does not say how to sample: auto (as the model's makers do) or vllm",
    ),
}
_SHORT = {"--tensor-parallel-size": ["-tp"], "--pipeline-parallel-size": ["-pp"]}
_OTHER_NAMES = {"--kv-cache-memory": ["--kv-cache-memory-bytes"]}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0; 1 where it failed; 2 where it was not understood."""
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    _show_log()
    try:
        sys.exit(args.run(args))
    except (ConfigError, InvalidRequest) as error:
        _fail(_as_flag(str(error)), 2)
    except PagedRayError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `pagedray … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _fail(message: str, status: int) -> NoReturn:
    print(f"pagedray: error: {message}", file=sys.stderr)
    sys.exit(status)


def _as_flag(message: str) -> str:
    """What `EngineConfig` says of a setting, said of the flag that set it."""

    def flag(match: re.Match[str]) -> str:
        name = "--" + match[1].replace("_", "-")
        return {"--num-kv-blocks": "--num-gpu-blocks-override"}.get(name, name)

    return re.sub(r"^(?:LLM|flags)\.(\w+)", flag, message)


def _show_log() -> None:
    """Show what PagedRay logs in this process, each line once."""
    seen: set[str] = set()

    def once(record: logging.LogRecord) -> bool:
        line = _as_flag(record.getMessage())
        record.msg, record.args = line, ()
        return not (line in seen or seen.add(line))  # type: ignore[func-returns-value]

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("pagedray: %(message)s"))
    handler.addFilter(once)
    logger = logging.getLogger("pagedray")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        _fail(f"{message}; {self.prog} --help says more", 2)

    def flags(self) -> list[str]:
        return [o for a in self._actions for o in a.option_strings]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    # as vLLM does: --max_model_len is --max-model-len
    argv = [re.sub(r"^--[\w-]+", lambda m: m[0].replace("_", "-"), a) for a in argv]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        if not flag.startswith("-"):
            _fail(f"unexpected argument {flag!r}", 2)
        flags = [f for f in args.parser.flags() if f.startswith("--")]
        _fail(f"{flag} is not a flag of {args.parser.prog}{nearest(flag, flags)}", 2)
    return args


def _parser() -> _Parser:
    parser = _Parser(prog="pagedray", description="Serve large language models on a Ray cluster.")
    parser.add_argument("--version", action="version", version=f"pagedray {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(within: Any, name: str, run: Any, about: str) -> _Parser:
        sub = within.add_parser(name, help=about, description=about, formatter_class=_Defaults)
        sub.set_defaults(run=run, parser=sub)
        return sub

    serve = command(commands, "serve", _serve, "serve a model, or a config, over the OpenAI API until Ctrl-C")
    serve.add_argument("model", nargs="?", metavar="MODEL|CONFIG.yaml", help=f"{_MODEL}; without it: the demo model")
    serve.add_argument("--host", default=None, help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=None, help="port to listen on; 0: a free one (default: 8000)")
    serve.add_argument("--served-model-name", metavar="NAME", help="the model's id in the API")
    serve.add_argument("--num-replicas", type=int, metavar="N", help="worker groups")
    serve.add_argument("--max-queued-requests", type=int, metavar="N", help="waiting requests, over which: 429")
    serve.add_argument("--files-path", type=Path, metavar="FOLDER", help="of /v1/files and /v1/batches; without: none")
    serve.add_argument(
        "--ray-address", metavar="ADDRESS", help="a Ray cluster that runs (default: RAY_ADDRESS, or none)"
    )
    for key, names in READERS.items():
        serve.add_argument("--" + key.replace("_", "-"), choices=names, help="how to read the model's text")
    serve.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="seconds until it must answer")
    serve.add_argument(
        "--grace-period", type=float, default=20.0, metavar="S", help="seconds for requests that run at SIGTERM"
    )
    _add_engine_flags(serve)

    generate = command(commands, "generate", _generate, "complete prompts in this process, without Ray")
    generate.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODEL}; without it: the demo model")
    generate.add_argument("--prompt", action="append", required=True, help="text to complete; may be given again")
    generate.add_argument("--chat", action="store_true", help="take the prompt as a user's message")
    for flag, (kind, about) in _SAMPLING_FLAGS.items():
        generate.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=about)
    generate.add_argument("--stop", action="append", default=argparse.SUPPRESS, help="text to stop at; may be repeated")
    generate.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on to --max-tokens")
    _add_engine_flags(generate)

    chat = command(commands, "chat", _chat, "chat with a model of a running server; Ctrl-D leaves")
    _add_endpoint_flags(chat, "--url")
    chat.add_argument("--system", help="the system prompt")
    chat.add_argument("--temperature", type=float, default=0.7, help="randomness")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="of an answer")

    drain = command(commands, "drain", _drain, "have a worker group move its sequences to others, and leave")
    drain.add_argument("group", nargs="?", metavar="GROUP", help="its id, or how it begins; without it: list them")
    drain.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="the server")
    drain.add_argument("--api-key", metavar="KEY", help="an operator's; default: OPENAI_API_KEY of the environment")
    drain.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for sequences to move")

    status = command(commands, "status", _status, "show what runs where on a running server")
    _add_server_flags(status)
    status.add_argument("--json", action="store_true", help="as JSON")

    top = command(commands, "top", _top, "show what a running server is doing, again and again; Ctrl-C leaves")
    _add_server_flags(top)
    top.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between two tables")
    top.add_argument("--count", type=int, metavar="N", help="tables to show (default: no end)")

    doctor = command(commands, "doctor", _doctor, "check this machine, and say how to mend what is wrong")
    doctor.add_argument("--host", default="127.0.0.1", help="address that a server would listen on")
    doctor.add_argument("--port", type=int, default=8000, help="port that it would listen on")
    doctor.add_argument("--ray-address", metavar="ADDRESS", help="try to join this Ray cluster (default: RAY_ADDRESS)")
    doctor.add_argument("--json", action="store_true", help="as JSON")

    bench = commands.add_parser("bench", help="measure a server, or the engine in this process")
    bench.set_defaults(parser=bench)
    kinds = bench.add_subparsers(required=True, metavar="serve|offline")
    online = command(kinds, "serve", _bench_serve, "measure any server with the OpenAI API")
    _add_endpoint_flags(online, "--base-url")
    _add_load_flags(online)
    online.add_argument("--endpoint", choices=["completions", "chat"], default="completions", help=" ")
    online.add_argument("--prompt-format", choices=["text", "ids"], default="text", help="random words, or token ids")
    online.add_argument("--vocab-size", type=int, default=8192, help="token ids are drawn below it")
    online.add_argument("--request-rate", type=float, metavar="R", help="requests a second, Poisson (default: at once)")
    online.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight at most")
    online.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before the measured ones")
    online.add_argument("--no-ignore-eos", action="store_true", help="for servers that refuse `ignore_eos`")
    online.add_argument("--timeout", type=float, default=600.0, help="seconds for a request")
    offline = command(kinds, "offline", _bench_offline, "measure the engine in this process, without Ray")
    offline.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODEL}; without it: the demo model")
    _add_load_flags(offline)
    _add_engine_flags(offline, leave_out="--seed")

    simulate = command(commands, "simulate", _simulate, "run a trace of requests through routing policies, simulated")
    simulate.add_argument("--trace", type=Path, required=True, metavar="FILE", help="Mooncake, Azure LLM or BurstGPT")
    simulate.add_argument("--groups", type=int, default=8, metavar="N", help="worker groups")
    simulate.add_argument("--policy", action="append", metavar="NAME", help="may be repeated (default: all)")
    simulate.add_argument(
        "--load", type=float, metavar="SHARE", help="of the capacity, such as 0.9 (default: as it is)"
    )
    simulate.add_argument("--rate", type=float, metavar="R", help="requests a second, instead of --load")
    simulate.add_argument("--limit", type=int, metavar="N", help="requests of the trace")
    simulate.add_argument("--spec", default="gpu-8b", metavar="NAME", help="what a group is")
    simulate.add_argument("--ttft-target", type=float, metavar="S", help="refuse what cannot start in time")
    simulate.add_argument(
        "--fault", action="append", default=[], metavar="KIND@S[:GROUP[:SECONDS[:FACTOR]]]", help="lost, slow, restart"
    )
    simulate.add_argument("--seed", type=int, default=0, help="of whatever is drawn")
    simulate.add_argument("--picture", type=Path, metavar="FILE.svg", help="TTFT and throughput by policy")
    return parser


_MODEL = "a folder, a .gguf file or a hub id"
_SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "--max-tokens": (int, "tokens to generate"),
    "--min-tokens": (int, "tokens before it may end"),
    "--n": (int, "choices"),
    "--temperature": (float, "0: greedy"),
    "--top-p": (float, "nucleus"),
    "--top-k": (int, "likeliest tokens; 0: all"),
    "--min-p": (float, "least share of the likeliest token's probability"),
    "--repetition-penalty": (float, "over 1: fewer repeats"),
    "--presence-penalty": (float, "-2 to 2"),
    "--frequency-penalty": (float, "-2 to 2"),
}


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows = action.default not in (None, False, argparse.SUPPRESS)
        return super()._get_help_string(action) if shows else action.help


def _add_engine_flags(parser: argparse.ArgumentParser, leave_out: str = "") -> None:
    group = parser.add_argument_group("engine", "vLLM's names; what is left out is decided from the model and machine")
    for flag, (kind, about) in _ENGINE_FLAGS.items():
        if flag != leave_out:
            names = [flag, *_OTHER_NAMES.get(flag, []), *_SHORT.get(flag, [])]
            group.add_argument(*names, type=kind, default=None, metavar=kind.__name__.upper(), help=about)
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="share the KV of equal beginnings; on unless turned off",
    )
    group.add_argument("--enforce-eager", action="store_true", default=None, help="no CUDA graphs")
    for name, (allowed, _) in IDLE_SETTINGS.items():  # taken, and not shown
        boolean = allowed is not None and isinstance(allowed[0], bool)
        how: Any = {"action": argparse.BooleanOptionalAction} if boolean else {"type": _literal}
        group.add_argument("--" + name.replace("_", "-"), default=None, help=argparse.SUPPRESS, **how)


def _add_endpoint_flags(parser: argparse.ArgumentParser, flag: str) -> None:
    _add_server_flags(parser, flag)
    parser.add_argument("--model", metavar="ID", help="as the server calls it (default: the first it has)")


def _add_server_flags(parser: argparse.ArgumentParser, flag: str = "--url") -> None:
    parser.add_argument(flag, dest="url", default="http://127.0.0.1:8000", metavar="URL", help="the server")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=32, metavar="N", help=" ")
    parser.add_argument("--input-len", default="128", metavar="N|LOW:HIGH", help="words (or ids) of a prompt")
    parser.add_argument("--output-len", default="128", metavar="N|LOW:HIGH", help="tokens to generate")
    parser.add_argument("--prefix-len", type=int, default=0, metavar="N", help="words (or ids) all prompts begin with")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def _engine_kwargs(args: argparse.Namespace, leave_out: str = "") -> dict[str, Any]:
    names = [f.removeprefix("--").replace("-", "_") for f in _ENGINE_FLAGS]
    names += ["enable_prefix_caching", "enforce_eager", *IDLE_SETTINGS]
    return {n: v for n in names if n != leave_out and (v := getattr(args, n)) is not None}


def _model(model: str | None) -> tuple[str, str | None]:
    """What to load, and the id it goes by if not its own. The demo model is fetched if it is not here."""
    from . import demo_model

    if model is None or model == demo_model.DEMO_MODEL_ID:
        return str(demo_model.fetch(progress=_say)), demo_model.DEMO_MODEL_ID
    return model, None


def _api_key(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get("OPENAI_API_KEY") or None


def _say(line: str) -> None:
    print(f"pagedray: {line}", file=sys.stderr, flush=True)


# One function a command: from flags to the call, and the exit status.


def _serve(args: argparse.Namespace) -> int:
    from ..workers.config import EngineConfig
    from . import local_server
    from .config import ApplicationConfig, check_split, read_config_file

    http: dict[str, Any] = {}
    kwargs = _engine_kwargs(args)
    if args.model and args.model.endswith((".yaml", ".yml")):
        given = [
            *kwargs,
            *(
                n
                for n in ("served_model_name", "num_replicas", "max_queued_requests", "files_path", *READERS)
                if getattr(args, n)
            ),
        ]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} does not go with a config: say it in {args.model}")
        arguments, http = read_config_file(args.model)
        _fetch_if_named(arguments)
        try:
            config = ApplicationConfig.parse(arguments)
            for deployment in config.models:
                check_split(deployment.engine, f"{deployment.where}.engine_kwargs")
        except ConfigError as error:
            raise ConfigError(f"{args.model}: {error}") from None
    else:
        model, name = _model(args.model)
        check_split(EngineConfig.from_kwargs("flags", model=model, **kwargs), "flags")  # so that errors name the flag
        kwargs = {key: value for key, value in kwargs.items() if key not in IDLE_SETTINGS}
        kwargs |= {key: value for key in READERS if (value := getattr(args, key))}
        arguments = ApplicationConfig.for_model(model, args.served_model_name or name, kwargs)
        if args.num_replicas is not None:
            arguments["llm_configs"][0]["deployment_config"] = {"num_replicas": args.num_replicas}
        if args.max_queued_requests is not None:
            arguments["scheduler"] = {"max_queued_requests": args.max_queued_requests}
        if args.files_path is not None:
            arguments["files"] = {"path": str(args.files_path.expanduser().absolute())}
    options = local_server.ServerOptions(
        host=args.host or http.get("host") or "127.0.0.1",
        port=args.port if args.port is not None else http.get("port", 8000),
        ray_address=args.ray_address,
        start_timeout=args.start_timeout,
        grace_period=args.grace_period,
    )
    local_server.serve(arguments, options)
    return 0


def _fetch_if_named(arguments: dict[str, Any]) -> None:
    """Get the demo model if a config asks for it by its id."""
    from . import demo_model

    by_role = (arguments.get(f"{role}_config") for role in ("prefill", "decode"))
    for model in [*(arguments.get("llm_configs") or []), *by_role]:
        loading = model.get("model_loading_config") if isinstance(model, dict) else None
        if isinstance(loading, dict) and loading.get("model_id") == demo_model.DEMO_MODEL_ID:
            if loading.get("model_source") is None:
                demo_model.fetch(progress=_say)


def _generate(args: argparse.Namespace) -> int:
    from ..scheduler.request import SamplingParams

    names = [f.removeprefix("--").replace("-", "_") for f in _SAMPLING_FLAGS] + ["stop", "ignore_eos"]
    wish = {n: getattr(args, n) for n in names if hasattr(args, n)}
    SamplingParams(**wish)  # before anything is loaded

    from .llm import LLM

    show = sys.stderr.isatty()
    llm = LLM(_model(args.model)[0], use_tqdm=show, **_engine_kwargs(args))
    sampling = llm.get_default_sampling_params().clone(**wish)
    if args.chat:
        chats = [[{"role": "user", "content": p}] for p in args.prompt]
        outputs = llm.chat(chats, sampling, use_tqdm=show)
    else:
        outputs = llm.generate(args.prompt, sampling, use_tqdm=show)
    for output in outputs:
        for choice in output.outputs:
            print(choice.text, flush=True)
    return 0


def _chat(args: argparse.Namespace) -> int:
    from .chat_client import ChatClient, converse

    wish = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    with ChatClient(args.url, args.model, _api_key(args), {k: v for k, v in wish.items() if v is not None}) as client:
        return converse(client, args.system)


def _drain(args: argparse.Namespace) -> int:
    from .drain import drain

    return drain(args.url, args.group, _api_key(args), args.timeout)


def _status(args: argparse.Namespace) -> int:
    from .status import show_status

    return show_status(args.url, _api_key(args), args.json)


def _top(args: argparse.Namespace) -> int:
    from .status import show_top

    if not 0 < args.interval < 3600 or (args.count is not None and args.count < 1):
        raise ConfigError("--interval must be a number of seconds over 0, and --count at least 1")
    return show_top(args.url, _api_key(args), args.interval, args.count)


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    facts = doctor.probe(args.host, args.port, args.ray_address or os.environ.get("RAY_ADDRESS") or None)
    return doctor.report(doctor.diagnose(facts), args.json)


def _bench_serve(args: argparse.Namespace) -> int:
    from . import bench

    load = bench.Load(
        url=args.url,
        model=args.model,
        api_key=_api_key(args),
        endpoint=args.endpoint,
        prompts=bench.Prompts(
            args.num_prompts,
            bench.parse_range("--input-len", args.input_len),
            bench.parse_range("--output-len", args.output_len),
            args.seed,
            args.vocab_size if args.prompt_format == "ids" else None,
            args.prefix_len,
        ),
        request_rate=args.request_rate,
        max_concurrency=args.max_concurrency,
        warmup=args.warmup,
        ignore_eos=not args.no_ignore_eos,
        timeout=args.timeout,
    )
    return bench.report(bench.run_serve(load), args.json)


def _bench_offline(args: argparse.Namespace) -> int:
    from . import bench

    prompts = bench.Prompts(
        args.num_prompts,
        bench.parse_range("--input-len", args.input_len),
        bench.parse_range("--output-len", args.output_len),
        args.seed,
        None,
        args.prefix_len,
    )
    return bench.report(bench.run_offline(_model(args.model)[0], prompts, _engine_kwargs(args, "seed")), args.json)


def _simulate(args: argparse.Namespace) -> int:
    from ..scheduler.simulation import study
    from ..scheduler.simulation.baselines import POLICIES
    from ..scheduler.simulation.traces import read_trace

    policies = args.policy or list(POLICIES)
    for flag, names, known in (("--policy", policies, POLICIES), ("--spec", [args.spec], study.SPECS)):
        for name in names:
            if name not in known:
                raise ConfigError(f"{flag} {name} is not known{nearest(name, known)}")
    if args.groups < 1:
        raise ConfigError(f"--groups must be at least 1, not {args.groups}")
    faults = [_fault(text, args.groups) for text in args.fault]
    spec = study.SPECS[args.spec]
    trace = read_trace(args.trace, args.limit)
    if not trace:
        raise ConfigError(f"{args.trace} has no requests")
    rate = args.rate
    if rate is None and args.load is not None:
        capacity = study.capacity(trace, args.groups, spec, seed=args.seed)
        rate = args.load * capacity
        _say(f"capacity {capacity:.2f} requests/s; {args.load:g} of it is {rate:.2f}")
    rows = study.compare(trace, rate, args.groups, spec, policies, faults, args.seed, args.ttft_target)
    print(study.table(rows))
    if args.picture:
        at = "as it is" if rate is None else f"{rate:.2f} requests/s"
        args.picture.write_text(study.picture(rows, f"{args.trace.name}, {at}, {args.groups} groups"), encoding="utf-8")
    return 0


def _fault(text: str, num_groups: int) -> Any:
    from ..scheduler.simulation.simulator import Fault

    kind, _, rest = text.partition("@")
    try:
        at, *fields = rest.split(":")
        convert = (int, float, float)
        fault = Fault(kind, float(at), *(c(f) for c, f in zip(convert, fields, strict=False)))
        if kind not in ("lost", "slow", "restart") or not 0 <= fault.group < num_groups or len(fields) > 3:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--fault must be such as lost@60:3:30, slow@60:3:30:2 or restart@60, not {text}") from None
    return fault


if __name__ == "__main__":
    main()
