"""Runs what docs/deploy.md shows, on hosts of network namespaces, and writes what was printed into the page.

    python tests/deploy/transcript.py [serve-yaml] [ray-up]      # as root; the demo model must be there

A transcript stands between `<!-- transcript: NAME -->` and `<!-- end -->`.
"""

import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "deploy")]

import yaml  # noqa: E402
from hosts import Host, Network  # noqa: E402

PAGE = ROOT / "docs" / "deploy.md"
QUESTION = (
    '{"model": "SmolLM2-135M-Instruct", "temperature": 0, '
    '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)
ASK = f"""curl -s HEAD:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{QUESTION}' | grep -o '"content":"[^"]*"'"""


class Transcript:
    """A shell on a host, whose commands and answers are kept, with the seconds that they took."""

    def __init__(self, host: Host, env: dict[str, str], names: dict[str, str]):
        self.host, self.names, self.lines = host, names, []
        self.env = {**env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(self, command: str, shown: str | None = None, keep: str = "", timeout: float = 300) -> None:
        """Run it; lines that match `keep`, or all that are not empty, are shown."""
        real = command
        for name, address in self.names.items():
            real = real.replace(name, address)
        began = time.monotonic()
        output = self.host.run("bash", "-c", f"cd {ROOT}; {real}", env=self.env, timeout=timeout)
        took = time.monotonic() - began
        output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).replace("\r", "\n")
        for name, address in self.names.items():
            output = output.replace(address, name)
        chosen = [line.rstrip() for line in output.split("\n") if re.search(keep or r"\S", line)]
        chosen = [re.sub(r"^\d{4}-\d\d-\d\d [\d:,]+\s+", "", line) for line in chosen]  # Ray's own clock
        self.lines += [f"$ {shown or command}", *(line[:150] for line in chosen), f"# {took:.1f} s", ""]
        print("\n".join(self.lines[-len(chosen) - 3 :]), flush=True)

    def write(self, name: str) -> None:
        text = "\n".join(self.lines).rstrip()
        page = PAGE.read_text()
        place = re.compile(rf"(<!-- transcript: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert place.search(page), f"{PAGE} has no place for {name}"
        PAGE.write_text(place.sub(lambda m: f"{m[1]}```console\n{text}\n```\n{m[2]}", page))


UP = "until curl -sf HEAD:8000/health; do sleep 0.2; done"


def serve_yaml() -> None:
    with Network(1) as network:
        (host,) = network.hosts
        shell = Transcript(host, {}, {"HEAD": "127.0.0.1"})
        ray = f"ray start --head --num-cpus=4 --node-ip-address={host.address} --disable-usage-stats"
        shell.run(ray, shown="ray start --head", keep="Ray runtime started")
        shell.run("serve deploy configs/serve-local.yaml", keep="successfully|error")
        shell.run(UP)
        shell.run(ASK)
        wrong = "sed s/max_model_len/max_modell_len/ configs/serve-local.yaml > /tmp/ray/wrong.yaml"
        shell.run(f"{wrong}; serve deploy /tmp/ray/wrong.yaml", keep="successfully|error")
        shell.run("until serve status | grep -o 'ConfigError: .*'; do sleep 0.2; done")
        shell.run(ASK)
        limit = "sed 's/      llm_configs:/      scheduler: {max_queued_requests: 64}\\n&/' configs/serve-local.yaml"
        shell.run(f"{limit} > /tmp/ray/limit.yaml; serve deploy /tmp/ray/limit.yaml", keep="successfully|error")
        shell.run("until serve status | grep -m 1 'status: RUNNING'; do sleep 0.2; done")
        shell.run(
            "ps -eo etimes,args | grep -o '[0-9]* ray::.*' # seconds that they have been running", keep="Replica|Leader"
        )
        shell.write("serve-yaml")


def ray_up() -> None:
    from test_ray_up import CONFIGS, machine_config, prepare_machine

    with Network(3, shm_bytes=3 * 2**30) as network:
        laptop, head, worker = network.hosts
        config = machine_config(laptop, head, worker)
        for host in (head, worker):
            prepare_machine(host, (laptop.home / "key.pub").read_text())
        file = laptop.home / "ray-up-local.yaml"
        file.write_text(yaml.safe_dump(config))
        document = yaml.safe_load((ROOT / "configs" / "serve-local.yaml").read_text())
        document["http_options"]["host"] = "0.0.0.0"
        (section,) = document["applications"][0]["args"]["llm_configs"]
        section["engine_kwargs"]["pipeline_parallel_size"] = 2
        section["placement_group_config"] = {"bundle_per_worker": {"CPU": 1}, "strategy": "STRICT_SPREAD"}
        across = laptop.home / "serve-two-machines.yaml"
        across.write_text(yaml.safe_dump(document))
        env = {"RAY_AUTH_MODE": "token"}
        names = {"HEAD": head.address, "WORKER": worker.address, "configs/ray-up-local.yaml": str(file)}
        shell = Transcript(laptop, env, names | {"serve-two-machines.yaml": str(across)})
        shell.run("ray get-auth-token --generate", keep="(?!)")
        up = f"RAY_UP_enable_autoscaler_v2=0 ray up -y {CONFIGS['local'].relative_to(ROOT)}"
        shell.run(up, keep="Ray runtime started|New status| ERR")
        shell.run("serve deploy serve-two-machines.yaml --address http://HEAD:8265", keep="successfully|error")
        shell.run(UP)
        shell.run(ASK)
        for name in ("HEAD", "WORKER"):
            ranks = f"ssh -o StrictHostKeyChecking=no -i {laptop.home}/key {name} ps -eo args | grep -o 'ray::[LR].*'"
            shell.run(
                ranks,
                shown=f"ssh {name} ps -eo args | grep -o 'ray::[LR].*' # leader and ranks",
                keep="ray::(Leader|Rank)",
            )
        shell.run(up.replace("ray up", "ray down"), keep="Stopp|shut down|error")
        ssh = f"ssh -o StrictHostKeyChecking=no -i {laptop.home}/key"
        stop = """bash -ic "'ray stop'" """
        shell.run(f"{ssh} WORKER {stop}", shown=f"ssh WORKER {stop.strip()}", keep="Stopped")
        for name in ("HEAD", "WORKER"):
            left = "ps -eo args | grep -c '[r]aylet'"
            shell.run(f"{ssh} {name} {left} || true", shown=f"ssh {name} {left}", keep=r"^\d+$")
        shell.write("ray-up")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("serve-yaml", "ray-up"):
        {"serve-yaml": serve_yaml, "ray-up": ray_up}[name]()
