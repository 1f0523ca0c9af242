"""The hosts that tests of several nodes stand on: they are apart, can be cut and lost, and leave nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hosts
import pytest
from waiting import wait_until

LISTEN = """
    import socket, sys
    server = socket.create_server((sys.argv[1], 5000))
    print("listening", flush=True)
    while True:
        server.accept()[0].sendall(b"hello")
"""
CONNECT = """
    import socket, sys
    try:
        print(socket.create_connection((sys.argv[1], 5000), timeout=1).recv(5).decode())
    except OSError:
        print("nobody")
"""


def names_of(network):
    """What the kernel and the file system still have of a network."""
    shown = [["ip", "netns", "list"], ["ip", "-brief", "link"]]
    lines = [line for c in shown for line in subprocess.check_output(c, text=True).splitlines()]
    return [line for line in lines if line.startswith(network)] + [str(f) for f in hosts._RECORDS.glob(network)]


def living(pids):
    return [p for p in pids if Path(f"/proc/{p}").exists() and "Z" not in Path(f"/proc/{p}/stat").read_text()]


@pytest.fixture
def network(start_hosts):
    with start_hosts(2) as network:
        yield network


def listen(host):
    server = host.popen(sys.executable, "-c", textwrap.dedent(LISTEN), host.address, stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"listening\n"
    return server


def connect(host, other):
    return host.python(textwrap.dedent(CONNECT), other.address).strip()


def test_a_host_has_its_own_of_everything(network):
    first, second = network.hosts
    (first.home / "mine").touch()
    first.run("sh", "-c", "touch /dev/shm/mine /tmp/ray/mine")
    look = "hostname; ls ~ /dev/shm /tmp/ray; grep h1 /etc/hosts"
    assert first.run("sh", "-c", look).count("mine") == 3
    seen = second.run("sh", "-c", look)
    assert int(second.run("sh", "-c", "echo /proc/[0-9]*/ | wc -w")) < 6  # of all that run on this machine
    assert seen.startswith("h2\n") and "mine" not in seen and f"{first.address} h1" in seen
    assert not Path("/dev/shm/mine").exists()
    assert not any("RAY_ADDRESS" in line for line in second.run("env").splitlines())
    with pytest.raises(AssertionError, match="ended with 3:\nwhy"):
        second.run("sh", "-c", "echo why; exit 3")
    with pytest.raises(AssertionError, match="took over 0.2 s"):
        second.run("sleep", "60", timeout=0.2)
    wait_until(lambda: len(second.processes()) == 1)


def test_a_host_reaps_what_others_leave(network):
    host = network.hosts[0]
    host.run("sh", "-c", "(sleep 0.1 &) ; (sleep 0.2 &)")  # their parent is gone
    wait_until(lambda: len(host.processes()) == 1)


def test_hosts_can_be_cut_off_slowed_and_lost(network):
    first, second = network.hosts
    listen(first)
    assert connect(second, first) == "hello"
    network.partition([first], [second])
    assert connect(second, first) == "nobody"
    network.heal()
    assert connect(second, first) == "hello"
    pids = list(first.processes())
    assert len(pids) == 2
    first.kill()
    assert not first.running and not living(pids)
    assert connect(second, first) == "nobody"
    first.start()
    listen(first)
    assert connect(second, first) == "hello"


def test_a_lost_host_does_not_change_the_way_to_this_process(network):
    """Whose card the others know; a bridge without an address of its own takes that of one of its ports."""
    card = Path(f"/sys/class/net/{network.name}/address")
    before = card.read_text()
    for host in network.hosts:
        host.kill()
        assert card.read_text() == before


def test_a_slow_host(network):
    first, second = network.hosts
    listen(first)
    try:
        first.slow(200)
    except hosts.Unavailable as reason:
        pytest.skip(str(reason))
    began = time.monotonic()
    assert connect(second, first) == "hello"
    assert time.monotonic() - began > 0.4  # the handshake's answer, and the word


def test_two_networks_at_once_and_nothing_left_of_either(start_hosts):
    with start_hosts(1) as one, start_hosts(1) as other:
        assert one.hosts[0].address != other.hosts[0].address
        listen(one.hosts[0])
        pids = [p for n in (one, other) for p in n.hosts[0].processes()]
        assert connect(other.hosts[0], one.hosts[0]) == "nobody"
        one.close()
        assert not names_of(one.name) and names_of(other.name)
        other.hosts[0].run("true")
    assert not names_of(other.name) and not living(pids)


def test_a_killed_owner_leaves_no_process_and_the_next_one_cleans_up(start_hosts):
    start_hosts(0).close()  # or skip
    owner = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        import hosts
        network = hosts.Network(2)
        network.partition([network.hosts[0]], [network.hosts[1]])
        network.hosts[0].popen("sleep", "600")
        while len(network.hosts[0].processes()) < 2:
            time.sleep(0.05)
        print(network.name, *(p for h in network.hosts for p in h.processes()), flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(owner), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            name, *pids = process.stdout.readline().split()
            assert len(living(pids)) == 3
            start_hosts(1).close()
            assert len(living(pids)) == 3 and names_of(name), "another session removed what is in use"
        finally:
            process.send_signal(signal.SIGKILL)
    wait_until(lambda: not living(pids))
    assert names_of(name)
    start_hosts(0).close()
    assert not names_of(name)


DRIVER = """
    import os, sys, ray
    ray.init("auto", log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=0)
    class Where:
        def address(self):
            return ray.util.get_node_ip_address(), os.getpid()

    actors = [Where.options(resources={name: 1}).remote() for name in ("h1", "h2")]
    print("news:", *(ray.get(a.address.remote(), timeout=60)[0] for a in actors), flush=True)
    call = None
    for line in sys.stdin:
        try:
            call = call or actors[1].address.remote()
            print("news:", ray.get(call, timeout=float(line))[0], flush=True)
            call = None
        except ray.exceptions.RayError as error:
            print("news:", type(error).__name__, flush=True)
"""
WATCHFUL = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="test_two_hosts.py does the same and more")
@pytest.mark.serve
def test_ray_over_two_hosts(start_hosts):
    with start_hosts(2) as network:
        head, other = network.hosts
        head.start_ray(env=WATCHFUL, h1=1)
        other.start_ray(head, h2=1)
        pids = [p for h in network.hosts for p in h.processes()]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        driver = head.popen(sys.executable, "-c", textwrap.dedent(DRIVER), **pipe)

        def news():  # among what Ray says
            return next(line.split()[1:] for line in driver.stdout if line.startswith("news:"))

        def ask(seconds):
            driver.stdin.write(f"{seconds}\n")
            driver.stdin.flush()
            return news()[0]

        assert news() == [head.address, other.address]
        network.partition([head], [other])
        assert ask(2) == "GetTimeoutError"
        network.heal()
        assert ask(30) == other.address
        other.kill()
        assert ask(60) in ("ActorDiedError", "ActorUnavailableError")
    assert not living(pids) and not names_of(network.name)
