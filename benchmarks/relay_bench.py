"""What the data plane costs: CPU of the router for each token, request and prompt, and how late a token is.

In front: `load_client` (Rust, raw sockets, never the limit). Behind: `mock_worker` (Rust, speaks the worker's contract,
never the limit). Between them the real services, each its own process: router, scheduler, cache. Both programs stamp
every id by one clock, so the way of each single token is measured, and not an average of gaps.

    PYTHONPATH=services python benchmarks/relay_bench.py                        # all cases, HTTP and gRPC
    PYTHONPATH=services python benchmarks/relay_bench.py --cases stream1000 --ways floor,http --json
    PYTHONPATH=services python benchmarks/relay_bench.py --ways floor,http,grpc,haproxy,smg

The ways, in turns within a round:

- `http`, `grpc`: through our router, by either door;
- `contract`: the client straight at the mock by the worker's contract, `floor`: by HTTP, the mock writing to every
  client itself. The floor's CPU is the mock's: what one write for each token and client costs on this kernel;
- `haproxy`, `smg`: a peer in front of the mock's HTTP door, where it is installed (smg in `$HEADRACE_PEERS/smg`);
  `smg-grpc`: smg before the mock's vLLM door, where it templates, tokenises and detokenises as our router does.

With `--workers 4000` so many workers have joined (all of them are the mock), and `/health` is asked meanwhile.

CPU is user and system time of the process that the way is about, its idle use subtracted: the figure to believe on a
shared machine, and best as a ratio to another way's in the same run. Latencies are of the machine of that minute.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh import EXAMPLES, BenchError, Mesh, Process, build_examples, percentile

from headrace import models
from headrace._gateway import Tokenizer

MODEL = "smollm2-135m"
MARK = " hello"
#: Longer prompts than the embedded model was made for: nobody computes them here.
CONTEXT_TOKENS = 131_072
CASE_TIMEOUT_S = 40.0
#: Of each worker, when there are many.
HEARTBEAT_S = 4.0
HEALTH_EVERY_S = 0.02


@dataclass(frozen=True)
class Case:
    """One load."""

    meaning: str
    streams: int
    requests: int
    tokens: int
    interval_ms: float
    tokens_per_frame: int = 1
    #: Engines that step out of turn, all on one stream.
    phases: int = 1
    prompt_bytes: int = 0
    #: The prompts are those of conversations with so many questions, of that size at their ends; 0 = one message each.
    turns: int = 0
    temperature: float = 1.0
    #: Connections that are open and silent meanwhile, after one request each.
    idle: int = 0
    #: All requests have one seed, so that at temperature 0 they are one question.
    one_question: bool = False
    #: What the row is about: "token", "request" or "prompt".
    unit: str = "token"

    @property
    def fits_contract(self) -> bool:
        """The worker's contract knows no text and no cache."""
        return not self.prompt_bytes and not self.one_question


CASES = {
    "stream1": Case("one stream, 10 ms apart", 1, 12, 50, 10),
    "stream32": Case("32 streams, 20 ms apart", 32, 128, 100, 20),
    "stream1000": Case("1,000 streams, 100 ms apart, one engine", 1000, 1000, 60, 100),
    "stream1000x20": Case("1,000 streams, 100 ms apart, 20 engines", 1000, 1000, 60, 100, phases=20),
    "idle10000": Case("2,000 streams, 100 ms apart, beside 10,000 idle connections", 2000, 2000, 40, 100, idle=10_000),
    "burst32": Case("32 streams, 16 tokens a frame, as fast as read", 32, 2048, 512, 0, tokens_per_frame=16),
    "request32": Case("one-token requests, 60 B prompt", 32, 8000, 1, 0, unit="request"),
    "cacheable32": Case(
        "the same at temperature 0, all distinct: looked up and stored",
        32,
        4000,
        1,
        0,
        temperature=0.0,
        prompt_bytes=-60,
        unit="request",
    ),
    "hit32": Case(
        "one answer from the response cache", 32, 4000, 1, 0, temperature=0.0, one_question=True, unit="request"
    ),
    "prompt8": Case(
        "one-token requests, 32 KB prompts, all distinct", 8, 400, 1, 0, prompt_bytes=32_000, unit="prompt"
    ),
    "turns8": Case(
        "one-token requests, conversations of 10 turns that end with 32 KB",
        8,
        400,
        1,
        0,
        prompt_bytes=32_000,
        turns=10,
        unit="prompt",
    ),
    "prompt20": Case(
        "one-token requests, 220 KB prompts, 20 at once", 20, 100, 1, 0, prompt_bytes=220_000, unit="prompt"
    ),
}


@dataclass(frozen=True)
class Way:
    """How the client reaches the mock."""

    #: The load client's protocol.
    protocol: str
    #: Whose CPU and memory the row is about.
    process: str


WAYS = {
    "contract": Way("worker", "mock"),
    "floor": Way("http", "mock"),
    "http": Way("http", "router"),
    "grpc": Way("grpc", "router"),
    "haproxy": Way("http", "haproxy"),
    "smg": Way("http", "smg"),
    "smg-grpc": Way("http", "smg-grpc"),
}
PEERS = Path(os.environ.get("HEADRACE_PEERS", Path.home() / ".cache/headrace-peers"))
HAPROXY = """
global
 maxconn 9000
 nbthread {threads}
defaults
 mode http
 timeout connect 5s
 timeout client 300s
 timeout server 300s
 http-reuse always
 option http-no-delay
frontend clients
 bind 127.0.0.1:{port}
 default_backend mock
backend mock
 server mock {mock}
"""


def english(size: int) -> str:
    """Prose of that many bytes: the standard library's docstrings, so the same on every machine with this Python."""
    parts, length = [], 0
    for path in sorted(Path(json.__file__).parents[1].glob("*.py")):
        text = "\n".join(path.read_text("utf-8", "ignore").split('"""')[1::2])
        parts.append(text)
        length += len(text)
        if length >= size:
            break
    text = "\n".join(parts)
    return (text * (size // len(text) + 1))[:size]


def prompts(case: Case, folder: Path) -> list[str]:
    """The client's option for this case's prompts: none for the 60 B one."""
    if not case.prompt_bytes:
        return []
    size = abs(case.prompt_bytes)
    file = folder / f"prompts-{case.prompt_bytes}-{case.turns}.json"
    if not file.exists():
        count = case.requests // max(1, case.turns)
        text = english(2_000_000)
        step = 7_000 if size > 1000 else 61
        starts = ((index * step) % (len(text) - size) for index in range(count))
        texts = [f"{index} {text[start : start + size]}" for index, start in enumerate(starts)]
        if case.turns:
            # Answers stand between the questions, and are as long.
            most = 2 * case.turns - 1
            cut = [[text[size * at // most : size * (at + 1) // most] for at in range(most)] for text in texts]
            asked = [messages[: 2 * turn + 1] for turn in range(case.turns) for messages in cut]
            file.write_text(json.dumps(asked))
        else:
            file.write_text(json.dumps(texts))
    return ["--prompts", str(file)]


def model_folder(folder: Path) -> tuple[Path, int, str]:
    """The embedded model's text side with a long context; the mark's id; the tokenizer's hash."""
    source = models.prepare("embedded", weights=False)
    made = folder / "model"
    shutil.copytree(source.path, made, ignore=shutil.ignore_patterns("*.gguf"))
    description = json.loads((made / "model.json").read_text())
    description.pop("weights", None)
    (made / "model.json").write_text(json.dumps(description | {"context_tokens": CONTEXT_TOKENS}))
    # Where smg looks for the same.
    template = (made / "chat_template.jinja").read_text()
    tokens = {name: description.get(name, "") for name in ("bos_token", "eos_token")}
    (made / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": template}))
    (made / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    ids = Tokenizer.from_file(made / "tokenizer.json").encode(MARK)
    if len(ids) != 1:
        raise BenchError(f"{MARK!r} is {len(ids)} ids in this vocabulary; one is needed")
    return made, ids[0], source.tokenizer_sha256


class Bench:
    """A mesh with a mock worker, and one client at a time."""

    def __init__(
        self, mesh: Mesh, ways: Sequence[str], threads: int, workers: int, tokenizer_cache_mib: int | None = None
    ) -> None:
        self.mesh = mesh
        self.threads = threads
        self.workers = workers
        folder, token_id, tokenizer_sha256 = model_folder(mesh.folder)
        mesh.config.write_text(f"[[models]]\nname = {json.dumps(MODEL)}\nsource = {json.dumps(str(folder))}\n")
        # Few reports of many: what they cost the scheduler is scheduler_bench's matter.
        router = {} if tokenizer_cache_mib is None else {"tokenizer_cache_mib": tokenizer_cache_mib}
        mesh.core(threads=threads, scheduler={"heartbeat_s": HEARTBEAT_S} if workers > 1 else {}, **router)
        self.mock = mesh.start(
            "mock",
            [
                str(EXAMPLES / "mock_worker"),
                *("--scheduler", mesh.scheduler, "--model", MODEL, "--token-id", str(token_id)),
                *("--tokenizer-sha256", tokenizer_sha256, "--context-tokens", str(CONTEXT_TOKENS)),
                *("--mark", MARK, "--model-folder", str(folder), "--workers", str(workers)),
            ],
            talks=True,
        )
        self.addresses = {
            "http": mesh.http,
            "grpc": mesh.grpc,
            "contract": str(mesh.ready["mock"]["address"]),
            "floor": str(mesh.ready["mock"]["http"]),
        }
        for name in ways:
            if name in ("haproxy", "smg", "smg-grpc"):
                self.addresses[name] = self.start_peer(name)
        self.ways = ways
        self.seed = 1
        self.idle: dict[str, float] = {}

    def start_peer(self, name: str) -> str:
        """A gateway of others in front of the mock's HTTP door; gives its address."""
        port, other_port = free_port(), free_port()
        mock = self.addresses["floor"]
        if name == "haproxy":
            file = self.mesh.folder / "haproxy.cfg"
            file.write_text(HAPROXY.format(threads=self.threads, port=port, mock=mock))
            command = [
                shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin") or "haproxy",
                "-db",
                "-f",
                str(file),
            ]
        else:
            backend = f"http://{mock}"
            more: tuple[str, ...] = ()
            if name == "smg-grpc":
                backend = f"grpc://{self.mesh.ready['mock']['vllm']}"
                more = ("--model-path", str(self.mesh.folder / "model"))
            command = [
                *(str(PEERS / "smg/bin/smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
                *("--worker-urls", backend, "--policy", "round_robin", "--log-level", "warn", *more),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(other_port)),
                *("--max-concurrent-requests", "8192"),
            ]
        try:
            self.mesh.processes[name] = Process(name, command, self.mesh.folder / f"{name}.log")
        except OSError as error:
            raise BenchError(f"{name} is not installed: {error}") from error
        return f"127.0.0.1:{port}"

    def warm_up(self) -> None:
        """Until every way answers; then what the processes use when nothing is asked of them."""
        case = Case("", 4, 64, 8, 0)
        until_s = time.monotonic() + 40 + self.workers / 20
        while self.joined() < self.workers:
            if time.monotonic() > until_s:
                raise BenchError(f"{self.joined()} of {self.workers} workers have joined")
            time.sleep(0.2)
        for way in self.ways:
            while self.client(way, case, patient=True)[0]["failed"]:
                if time.monotonic() > until_s:
                    raise BenchError(f"{way} does not answer:\n{self.mesh.processes[WAYS[way].process].tail()}")
                time.sleep(0.2)
        if self.workers > 1 and {"http", "grpc"} & set(self.ways):
            # Each worker is connected to with its first request, and that is not what a request costs.
            self.client("grpc" if "grpc" in self.ways else "http", Case("", 32, 4 * self.workers, 1, 0), patient=True)
        # The least of three looks: some have still to do with their start.
        for _ in range(3):
            began_s = time.monotonic()
            with self.mesh.spent() as spent:
                time.sleep(2.0)
            shares = {name: cpu_s / (time.monotonic() - began_s) for name, cpu_s in spent.items()}
            self.idle = {name: min(share, self.idle.get(name, share)) for name, share in shares.items()}

    def joined(self) -> int:
        """Workers that take requests, as the scheduler counts them."""
        with urllib.request.urlopen(f"http://{self.mesh.ready['scheduler']['metrics']}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        ready = [line for line in lines if line.startswith("headrace_scheduler_workers{") and 'state="ready"' in line]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in ready))

    def client(self, way: str, case: Case, *, patient: bool = False) -> tuple[dict[str, Any], Path]:
        """One run of the load client: its report and its stamps. A patient one takes no connection for a failure."""
        self.mock.tell("reset")
        self.mock.tell(
            f"set interval_ms={case.interval_ms} tokens_per_frame={case.tokens_per_frame} phases={case.phases}"
        )
        stamps = self.mesh.folder / "client.stamps"
        command = [
            *(str(EXAMPLES / "load_client"), "--protocol", WAYS[way].protocol, "--address", self.addresses[way]),
            *("--model", MODEL, "--streams", str(case.streams), "--requests", str(case.requests)),
            *("--tokens", str(case.tokens), "--temperature", str(case.temperature), "--mark", MARK),
            *("--first-seed", str(self.seed), "--timeout-s", str(CASE_TIMEOUT_S), "--stamps", str(stamps)),
            *("--same-seed", str(case.one_question).lower()),
            *prompts(case, self.mesh.folder),
        ]
        self.seed += case.requests
        ran = subprocess.run(command, capture_output=True, text=True, timeout=CASE_TIMEOUT_S + 30, check=False)
        if ran.returncode and patient:
            return {"failed": case.requests}, stamps
        if ran.returncode:
            raise BenchError(ran.stderr.strip())
        report: dict[str, Any] = json.loads(ran.stdout)
        return report, stamps

    def measure(self, way: str, case: Case) -> dict[str, Any]:
        """One case by one way."""
        overflows = listen_overflows()
        with idle_connections(self.addresses["http" if way == "grpc" else way], case.idle):
            began_s = time.monotonic()
            with self.mesh.spent() as spent, probed(self.mesh.http if self.workers > 1 else "") as health_us:
                report, stamps = self.client(way, case)
            took_s = time.monotonic() - began_s
            rss_mb = {name: process.rss_mb() for name, process in self.mesh.processes.items()}
        sent = self.mesh.folder / "mock.stamps"
        self.mock.tell(f"dump {sent}")
        count = max(1, report["tokens"] if case.unit == "token" else report["requests"])
        cpu_us = {
            name: max(0.0, cpu_s - self.idle.get(name, 0.0) * took_s) / count * 1e6 for name, cpu_s in spent.items()
        }
        return {
            "way": way,
            "unit": case.unit,
            "requests": report["requests"],
            "tokens": report["tokens"],
            "failed": report["failed"],
            "failures": report["failures"],
            "wall_s": report["wall_s"],
            "per_s": count / report["wall_s"],
            "cpu_us": cpu_us,
            "relay_cpu_us": cpu_us[WAYS[way].process],
            "rss_mb": rss_mb,
            "listen_overflows": listen_overflows() - overflows,
            "health_us": {"p50": percentile(health_us, 0.5), "p99": percentile(health_us, 0.99)},
            **latencies(read_stamps(stamps), read_stamps(sent)),
        }


@contextlib.contextmanager
def idle_connections(address: str, count: int) -> Iterator[None]:
    """So many that have had one answer and say no more. Raises BenchError when one is refused or gets none."""
    host, port = address.rsplit(":", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection((host, int(port)), timeout=10)
            connections.append(connection)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        for number, connection in enumerate(connections):
            if not connection.recv(4096).startswith(b"HTTP/1.1 "):
                raise BenchError(f"connection {number} of {count} was not answered")
        yield
    except OSError as error:
        raise BenchError(f"connection {len(connections)} of {count}: {error}") from error
    finally:
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def probed(address: str) -> Iterator[list[float]]:
    """How long ``/health`` takes, in microseconds, asked again and again meanwhile; nothing without an address."""
    took_us: list[float] = []
    over = threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection(address, timeout=10)
        while not over.wait(HEALTH_EVERY_S):
            began_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            took_us.append((time.perf_counter() - began_s) * 1e6)
        connection.close()

    prober = threading.Thread(target=ask)
    if address:
        prober.start()
    try:
        yield took_us
    finally:
        over.set()
        if address:
            prober.join()


def listen_overflows() -> int:
    """Connections of this machine that met a full accept queue, since it was started."""
    names, values = (
        line.split() for line in Path("/proc/net/netstat").read_text().splitlines() if line.startswith("TcpExt:")
    )
    return int(values[names.index("ListenOverflows")])


def read_stamps(file: Path) -> dict[int, list[int]]:
    """By seed: the request's stamp, then each id's."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {int(row[0]): [int(word) for word in row[1:]] for row in rows}


def latencies(client: dict[int, list[int]], mock: dict[int, list[int]]) -> dict[str, Any]:
    """Microseconds, p50 and p99: client to worker, worker to client (each id), and sending to the first id."""
    there, back, first = [], [], []
    for seed, (asked, *came) in client.items():
        if came:
            first.append((came[0] - asked) / 1e3)
        received, *left = mock.get(seed, [0])
        if received:
            there.append((received - asked) / 1e3)
        if len(left) == len(came):
            back += [(end - begin) / 1e3 for begin, end in zip(left, came, strict=True)]
    return {
        name: {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
        for name, values in (("request_path_us", there), ("token_path_us", back), ("ttft_us", first))
    }


def free_port() -> int:
    """A port that nobody has now, for programs that cannot say which one they got."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def combine(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over the rounds; failures are summed."""
    first = rounds[0]
    combined: dict[str, Any] = {}
    for key, value in first.items():
        if key == "failed":
            combined[key] = sum(row[key] for row in rounds)
        elif key == "failures":
            combined[key] = [text for row in rounds for text in row[key]][:3]
        elif isinstance(value, dict):
            combined[key] = {part: median([row[key][part] for row in rounds]) for part in value}
        elif isinstance(value, int | float):
            combined[key] = statistics.median(row[key] for row in rounds)
        else:
            combined[key] = value
    return combined


def median(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def chosen(option: str, text: str, known: dict[str, Any]) -> list[str]:
    """The names in a list, all of them known."""
    names = text.split(",")
    unknown = ", ".join(name for name in names if name not in known)
    if unknown:
        raise BenchError(f"--{option}: no such {option}: {unknown} (there are: {', '.join(known)})")
    return names


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    names = chosen("cases", arguments.cases, CASES)
    ways = chosen("ways", arguments.ways, WAYS)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with Mesh() as mesh:
        bench = Bench(mesh, ways, arguments.threads, arguments.workers, arguments.tokenizer_cache_mib)
        bench.warm_up()
        start_mb = {name: process.rss_mb() for name, process in mesh.processes.items()}
        for _ in range(arguments.rounds):
            for name in names:
                for way in ways:
                    if way == "contract" and not CASES[name].fits_contract:
                        continue
                    row = bench.measure(way, CASES[name])
                    rows.setdefault((name, way), []).append(row)
                    if not arguments.json:
                        show(name, row)
        end_mb = {name: process.rss_mb() for name, process in mesh.processes.items()}
        idle = bench.idle
    table = [{"case": name, **combine(of_way)} for (name, _), of_way in rows.items()]
    for row in table:
        ours = rows[row["case"], row["way"]]
        row["cpu_ratios"] = {
            other: statistics.median(one["relay_cpu_us"] / max(its["relay_cpu_us"], 1e-3) for one, its in pairs)
            for other in ways
            if other != row["way"] and (pairs := list(zip(ours, rows.get((row["case"], other), ()), strict=False)))
        }
    return {
        "settings": vars(arguments),
        "idle_cpu": idle,
        "rss_mb": {"start": start_mb, "end": end_mb},
        "rows": table,
    }


def in_words(latency: dict[str, float | None]) -> str:
    return " / ".join("-" if us is None else f"{us:.0f}" for us in latency.values()).rjust(15)


def show(name: str, row: dict[str, Any]) -> None:
    first, path, cpu = in_words(row["ttft_us"]), in_words(row["token_path_us"]), row["cpu_us"]
    print(
        f"{name:14s} {row['way']:8s} {row['per_s']:8.0f} {row['unit']}s/s"
        f"  CPU us/{row['unit']} {row['relay_cpu_us']:8.2f}"
        f" (scheduler {cpu['scheduler']:6.1f}, cache {cpu['cache']:6.1f}, mock {cpu['mock']:6.2f})"
        f"  TTFT us {first}  token path us {path}"
        + (f"  /health us {in_words(row['health_us'])}" if row["health_us"]["p50"] is not None else "")
        + f"  {row['rss_mb'][WAYS[row['way']].process]:4.0f} MB"
        + (f"  LISTEN OVERFLOWS {row['listen_overflows']}" if row["listen_overflows"] else "")
        + (f"  FAILED {row['failed']}: {row['failures']}" if row["failed"] else ""),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer-cache-mib", type=int, default=None, help="of the router; 0 = none (the default is the router's)"
    )
    parser.add_argument("--cases", default=",".join(CASES), help="of: " + ", ".join(CASES))
    parser.add_argument("--ways", default="contract,floor,http,grpc", help="of: " + ", ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of the router's data plane, and of haproxy")
    parser.add_argument("--workers", type=int, default=1, help="workers that have joined")
    parser.add_argument("--no-build", dest="build", action="store_false", help="take the Rust programs as they are")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        if arguments.build:
            build_examples()
        result = run(arguments)
    except BenchError as error:
        sys.exit(f"relay_bench: {error}")
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    print(f"\nmedian of {arguments.rounds} rounds; p50 / p99")
    for row in result["rows"]:
        show(row["case"], row)
    print("\nCPU of our router as a ratio to the others', median of the rounds' own ratios")
    for row in result["rows"]:
        if row["way"] in ("http", "grpc"):
            ratios = "  ".join(f"{other} {ratio:.2f}" for other, ratio in row["cpu_ratios"].items())
            print(f"{row['case']:14s} {row['way']:5s} {ratios}")
    sizes = result["rss_mb"]
    print("\nRSS MB, start and end:", {name: [round(sizes[at][name]) for at in sizes] for name in sizes["end"]})


if __name__ == "__main__":
    main()
