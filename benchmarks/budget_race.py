"""Eight processes race for one tenant's budget of 100,000 tokens with 1,000 requests, over eight routers.

What must hold, and is checked: no more is spent than the budget; the ledger has exactly what the workers gave; and what
clients were told they were given is in it. ``--schedulers 2`` shares the budget by Redis or Valkey between two
schedulers, each with half of the routers and a worker of its own. ``--kill`` kills one router, and then a scheduler,
with SIGKILL in the middle. Nothing here is a claim about speed; how long it took is printed all the same.

    .venv/bin/python benchmarks/budget_race.py [--schedulers 2] [--kill] [--routers 8]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import time
import urllib.request
from multiprocessing.synchronize import Event
from typing import Any

from mesh import ROOT, Mesh, Process

sys.path[:0] = [str(ROOT), str(ROOT / "services")]

from tests.support.toy import ToyModel  # noqa: E402

from headrace import tenants  # noqa: E402
from headrace.ledger import usage  # noqa: E402
from headrace.ledger.store import Store  # noqa: E402

BUDGET = 100_000
PROCESSES = 8
REQUESTS = 1000
#: So long a client tries to get a request through.
PATIENCE_S = 60.0


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedulers", type=int, default=1, choices=(1, 2))
    parser.add_argument("--routers", type=int, default=8)
    parser.add_argument("--kill", action="store_true", help="SIGKILL for a router and a scheduler in the middle")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    with Mesh() as mesh:
        race(mesh, args)


def race(mesh: Mesh, args: argparse.Namespace) -> None:
    """Starts all of it, lets them race, and checks the books."""
    file = mesh.folder / "tenants.json"
    with tenants.changing(file) as known:
        key = tenants.add(
            known,
            "acme",
            limits={"tokens_per_day": BUDGET},
            now_s=time.time(),
            token=lambda size: os.urandom(size).hex(),
        )
    model = ToyModel("toy", context_tokens=2048).write(mesh.folder)
    mesh.config.write_text(
        f'[[models]]\nname = "toy"\nsource = "{model}"\n[tenants]\nfile = "{file}"\n[prices]\nworker_hour = 3.6\n'
    )
    shared = redis(mesh) if args.schedulers > 1 else ""
    for number in range(args.schedulers):
        scheduler(mesh, number, free_port(), shared)
        mesh.service(
            "worker",
            name=f"worker-{number}",
            address="127.0.0.1:0",
            metrics_address="127.0.0.1:0",
            scheduler=mesh.ready[f"scheduler-{number}"]["address"],
            cache="",
            model="toy",
            engine="sim",
            slots=32,
            sim_step_ms=1.0,
            sim_step_ms_per_sequence=0.02,
            sim_prefill_tokens_per_s=100_000,
            kv_tokens=65_536,
        )
    doors = []
    for number in range(args.routers):
        address = mesh.ready[f"scheduler-{number % args.schedulers}"]["address"]
        inner = {"http_address": "127.0.0.1:0", "grpc_address": "127.0.0.1:0", "threads": 1}
        mesh.service("router", name=f"router-{number}", scheduler=address, cache="", **inner)
        doors.append(mesh.ready[f"router-{number}"]["http"])
    for door in doors:
        wait_until(lambda door=door: healthy(door), f"{door} is ready")
    results: multiprocessing.Queue[dict[str, int]] = multiprocessing.Queue()
    go, half = multiprocessing.Event(), multiprocessing.Event()
    clients = [
        multiprocessing.Process(target=client, args=(number, doors, key, args.seed, go, half, results), daemon=True)
        for number in range(PROCESSES)
    ]
    for each in clients:
        each.start()
    began_s = time.monotonic()
    go.set()
    if args.kill:
        half.wait(PATIENCE_S)
        mesh.processes["router-1"].kill()
        time.sleep(0.1)
        port = int(mesh.ready["scheduler-0"]["address"].rpartition(":")[2])
        mesh.processes["scheduler-0"].kill()
        scheduler(mesh, 0, port, shared)
    told = [results.get(timeout=5 * PATIENCE_S) for _ in clients]
    took_s = time.monotonic() - began_s
    sums = {name: sum(each[name] for each in told) for name in told[0]}
    check(mesh, args, sums, took_s)


def scheduler(mesh: Mesh, number: int, port: int, shared: str) -> None:
    """One with a ledger of its own, as the same one when it is started again."""
    folder = mesh.folder / f"ledger-{number}"
    ledger = [f"ledger.database={folder / 'ledger.db'}", f"ledger.name=scheduler-{number}", f"ledger.shared={shared}"]
    settings = [
        f"scheduler.address=127.0.0.1:{port}",
        "scheduler.metrics_address=127.0.0.1:0",
        "scheduler.cache=",
        "scheduler.router_grace_s=2",
        *ledger,
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    name = f"scheduler-{number}"
    mesh.start(name, [sys.executable, "-P", "-m", "headrace", "scheduler", "--config", str(mesh.config), *words])


def redis(mesh: Mesh) -> str:
    """A server of its own."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        sys.exit("neither valkey-server nor redis-server is installed")
    port = free_port()
    words = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(mesh.folder)]
    mesh.processes["redis"] = Process("redis", words, mesh.folder / "redis.log")

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    wait_until(answers, "Redis is there")
    return f"redis://127.0.0.1:{port}/0"


def client(
    number: int,
    doors: list[str],
    key: str,
    seed: int,
    go: Event,
    half: Event,
    results: multiprocessing.Queue[dict[str, int]],
) -> None:
    """Asks its part of the requests, each at some router; what it was told it got."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dice = random.Random(seed * PROCESSES + number)
    said = {"answered": 0, "cut": 0, "refused": 0, "lost": 0, "tokens": 0}
    go.wait()
    for turn in range(REQUESTS // PROCESSES):
        if turn == REQUESTS // PROCESSES // 4:
            half.set()
        body = {
            "model": "toy",
            "prompt": "x" * dice.randrange(1, 60),
            "max_tokens": dice.randrange(20, 400),
            "temperature": 1,
            "ignore_eos": True,
        }
        ask(doors, key, body, dice, said)
    results.put(said)


def ask(doors: list[str], key: str, body: dict[str, Any], dice: random.Random, said: dict[str, int]) -> None:
    """One request, until it is answered, refused for good, or its router dies with it."""
    until_s = time.monotonic() + PATIENCE_S
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    while time.monotonic() < until_s:
        door = dice.choice(doors)
        connection = http.client.HTTPConnection(door, timeout=PATIENCE_S)
        try:
            connection.connect()
        except OSError:
            continue  # that router is gone: another one
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            content = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException):
            said["lost"] += 1
            return
        finally:
            connection.close()
        if response.status == 200:
            said["answered"] += 1
            said["tokens"] += content["usage"]["total_tokens"]
            return
        code = content["error"]["code"]
        if code == "insufficient_quota":
            said["cut" if "used up" in content["error"]["message"] else "refused"] += 1
            return
        # Others hold what is left, or a scheduler is away for a moment.
        time.sleep(0.05)
    said["refused"] += 1


def check(mesh: Mesh, args: argparse.Namespace, said: dict[str, int], took_s: float) -> None:
    """Compares the ledgers with what workers gave and clients got."""
    stores = [
        Store.open(str(mesh.folder / f"ledger-{number}" / "ledger.db"), "", write=False)
        for number in range(args.schedulers)
    ]

    def books() -> tuple[int, int, int, int]:
        totals = [usage.ask(store, usage.Question(())).total for store in stores]
        left = sum(store.query("SELECT COUNT(*) FROM open_bookings")[0][0] for store in stores)
        return (
            sum(total.requests for total in totals),
            sum(total.prompt_tokens for total in totals),
            sum(total.output_tokens for total in totals),
            left,
        )

    # Of a router that was killed, the scheduler waits for a while whether it comes back.
    until_s = time.monotonic() + 20
    while books()[3] and time.monotonic() < until_s:
        time.sleep(0.1)
    requests, prompt, output, left = books()
    given = sum(given_by(mesh.ready[f"worker-{number}"]["metrics"]) for number in range(args.schedulers))
    rows = [row for store in stores for row in store.query("SELECT booking, request_id FROM requests")]
    spent = prompt + output
    print(json.dumps({"clients": said, "took_s": round(took_s, 2)}))
    print(json.dumps({"rows": requests, "spent": spent, "budget": BUDGET, "output": output, "workers_gave": given}))
    failures = []
    if spent > BUDGET:
        failures.append(f"{spent} tokens are spent, the budget is {BUDGET}")
    if output != given:
        failures.append(f"the ledger has {output} tokens, the workers gave {given}")
    if said["tokens"] > spent:
        failures.append(f"clients were given {said['tokens']} tokens, the ledger has {spent}")
    if not args.kill and said["cut"] == 0 and said["tokens"] != spent:
        failures.append(f"clients were given {said['tokens']} tokens, the ledger has {spent}")
    if left:
        failures.append(f"{left} bookings are open for ever")
    if len(set(rows)) != len(rows):
        failures.append("a request is booked twice")
    if spent < 0.9 * BUDGET:
        failures.append(f"only {spent} tokens were spent: there was no race at the end")
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        for name, process in mesh.processes.items():
            print(f"--- {name}\n{process.tail(5)}")
        sys.exit(1)
    print("exact")


def given_by(metrics: str) -> int:
    """Ids that a worker has given to routers."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as page:
        for line in page.read().decode().splitlines():
            if line.startswith('headrace_worker_tokens_total{kind="given"}'):
                return int(float(line.rpartition(" ")[2]))
    raise AssertionError("the worker does not count")


def healthy(door: str) -> bool:
    """Whether a router would serve."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{door}/health", timeout=5):
        return True
    return False


def wait_until(what: Any, name: str) -> None:
    """Polls. Exits when it takes too long."""
    until_s = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > until_s:
            sys.exit(f"{name}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.1)


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
