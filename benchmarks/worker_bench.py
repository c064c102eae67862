"""What a worker costs around an engine that takes no time: CPU for each token, beside one message a token and request.

The engine is the stand-in for TensorRT-LLM of the tests, whose model is a hash; it steps at a pace at which nothing is
saturated. Three ways, in turns within a round, each its own process:

- `floor`: the LLM API alone, a task that iterates over each request's result. What any server around it pays;
- `worker`: our worker, the engine in its child, all requests on one stream;
- `servicer`: the common pattern, as in trtllm-serve's gRPC server: the engine in the server's process, one call a
  request and one message a token.

    PYTHONPATH=services .venv/bin/python benchmarks/worker_bench.py [--requests 1,64,256,1024] [--rounds 3] [--json]

CPU is user and system time of the server's processes from the first token to the last; above the floor is what the way
itself costs. The client is in a process of its own and not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import standin  # noqa: E402

WAYS = ("floor", "worker", "servicer")
#: At these paces the slowest way uses less than a core.
STEP_S = {1: 0.005, 64: 0.02, 256: 0.04, 1024: 0.15}
PROMPT = [30, 31, 32]


@dataclass(frozen=True)
class Load:
    """So many requests at once, each of so many tokens."""

    requests: int
    tokens: int
    step_s: float


def load_of(requests: int, seconds: float) -> Load:
    """About so long."""
    step_s = min((step for most, step in STEP_S.items() if requests <= most), default=0.15)
    return Load(requests, max(20, int(seconds / step_s)), step_s)


# --- servers ----------------------------------------------------------------------------------------------------------


async def serve_worker(load: Load) -> None:
    """Our worker on a free port."""
    from headrace.config import WorkerConfig
    from headrace.serving import Service
    from headrace.v1 import worker_pb2_grpc
    from headrace.worker.servicer import FULL_NAME, WorkerService

    sys.setswitchinterval(0.0005)
    config = WorkerConfig(slots=load.requests, max_waiting=load.requests, block_tokens=32, prefix_cache=False)
    room = load.requests * (load.tokens + 64)
    engine = standin.engine(config, kv_tokens=room, context_tokens=load.tokens + 64, step_s=load.step_s)
    server = Service("worker", "127.0.0.1:0")
    service = WorkerService(config, engine, server.registry)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, service, FULL_NAME)
    await server.start()
    await service.start("toy")
    say(server.address)
    await asyncio.to_thread(sys.stdin.read)
    await service.stop()
    await server.stop(0)


def make_llm(load: Load) -> Any:
    """The stand-in in this process; the environment has its path."""
    import tensorrt_llm

    kv = tensorrt_llm.llmapi.KvCacheConfig(
        max_tokens=load.requests * (load.tokens + 64), tokens_per_block=32, enable_block_reuse=False
    )
    return tensorrt_llm.LLM(
        "/nowhere",
        skip_tokenizer_init=True,
        kv_cache_config=kv,
        max_batch_size=load.requests,
        max_seq_len=load.tokens + 64,
        enable_iter_perf_stats=True,
        enable_chunked_prefill=True,
    )


def sampling_of(load: Load) -> Any:
    """Greedy, to the end."""
    import tensorrt_llm

    return tensorrt_llm.SamplingParams(end_id=2, ignore_eos=True, top_k=1, max_tokens=load.tokens, detokenize=False)


async def serve_servicer(load: Load) -> None:
    """One message a token and request."""
    import grpc
    from smg_grpc_proto import trtllm_service_pb2 as pb
    from smg_grpc_proto import trtllm_service_pb2_grpc

    llm = make_llm(load)

    class Servicer(trtllm_service_pb2_grpc.TrtllmServiceServicer):
        async def Generate(self, request: Any, context: Any) -> Any:
            prompt = list(request.tokenized.input_token_ids)
            sent = 0
            async for result in llm.generate_async(prompt, sampling_of(load), streaming=True):
                output = result.outputs[0]
                chunk = pb.GenerateStreamChunk(
                    token_ids=output.token_ids[sent:],
                    sequence_index=0,
                    prompt_tokens=len(prompt),
                    completion_tokens=len(output.token_ids),
                    cached_tokens=result.cached_tokens,
                )
                sent = len(output.token_ids)
                yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)

    server = grpc.aio.server()
    trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(f"127.0.0.1:{port}")
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    llm.shutdown()


async def serve_floor(load: Load) -> None:
    """No server: the tasks alone, when told to begin."""
    llm = make_llm(load)
    say("none")
    await asyncio.to_thread(sys.stdin.readline)

    async def one() -> None:
        sent = 0
        async for result in llm.generate_async(PROMPT, sampling_of(load), streaming=True):
            sent += len(result.outputs[0].token_ids[sent:])

    await asyncio.gather(*(one() for _ in range(load.requests)))
    say("done")
    await asyncio.to_thread(sys.stdin.read)
    llm.shutdown()


def say(text: str) -> None:
    print(text, flush=True)


# --- clients ----------------------------------------------------------------------------------------------------------


async def ask_worker(address: str, load: Load) -> int:
    """All on one stream; tokens that came."""
    from headrace import serving
    from headrace.v1 import types_pb2, worker_pb2, worker_pb2_grpc

    async with serving.channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        message = worker_pb2.RunRequest(hello=worker_pb2.RunHello(router_id="bench"))
        for number in range(load.requests):
            message.submits.add(
                request=number + 1,
                epoch=1,
                prompt_ids=PROMPT,
                sampling=types_pb2.Sampling(top_p=1, repetition_penalty=1, seeds=[1]),
                stopping=types_pb2.Stopping(max_tokens=load.tokens, ignore_eos=True),
            )
        await call.write(message)
        tokens = ended = 0
        async for frame in call:
            for delta in frame.deltas:
                tokens += len(delta.ids)
                ended += delta.HasField("finish")
            if ended == load.requests:
                break
        call.cancel()
        return tokens


async def ask_servicer(address: str, load: Load) -> int:
    """One call each."""
    import grpc
    from smg_grpc_proto import trtllm_service_pb2 as pb
    from smg_grpc_proto import trtllm_service_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = trtllm_service_pb2_grpc.TrtllmServiceStub(channel)

        async def one(number: int) -> int:
            request = pb.GenerateRequest(
                request_id=str(number), tokenized=pb.TokenizedInput(input_token_ids=PROMPT), max_tokens=load.tokens
            )
            tokens = 0
            async for response in stub.Generate(request):
                tokens += len(response.chunk.token_ids)
            return tokens

        return sum(await asyncio.gather(*(one(number) for number in range(load.requests))))


# --- measuring --------------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """User and system time of that process and of those below it, as far as they live."""
    total, below = 0.0, [pid]
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            times[int(entry.name)] = (int(fields[11]) + int(fields[12])) / ticks
    while below:
        each = below.pop()
        total += times.get(each, 0.0)
        below += children.get(each, [])
    return total


def measure(way: str, load: Load) -> float:
    """CPU µs a token."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "services"), str(ROOT)])}
    if way != "worker":
        environment |= standin.environment(step_s=load.step_s)
        environment["PYTHONPATH"] = os.pathsep.join([str(standin.PATH), str(ROOT / "services"), str(ROOT)])
    command = [sys.executable, __file__, "--serve", way, "--load", f"{load.requests},{load.tokens},{load.step_s}"]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        if not address:
            raise SystemExit(f"{way}: the server did not start")
        before = cpu_s(server.pid)
        if way == "floor":
            server.stdin.write("go\n")
            server.stdin.flush()
            assert server.stdout.readline().strip() == "done"
            tokens = load.requests * load.tokens
        else:
            ask = ask_worker if way == "worker" else ask_servicer
            tokens = asyncio.run(ask(address, load))
        spent = cpu_s(server.pid) - before
        if tokens != load.requests * load.tokens:
            raise SystemExit(f"{way}: {tokens} tokens came of {load.requests * load.tokens}")
        return spent / tokens * 1e6
    finally:
        server.stdin.close()
        server.wait(30)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,64,256,1024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement, about")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        requests, tokens, step_s = options.load.split(",")
        serve = {"worker": serve_worker, "servicer": serve_servicer, "floor": serve_floor}[options.serve]
        asyncio.run(serve(Load(int(requests), int(tokens), float(step_s))))
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if not options.json:
        print("| requests | floor, µs a token | worker | servicer | above the floor: worker | servicer | ratio |")
        print("|---|---|---|---|---|---|---|")
    for requests in map(int, options.requests.split(",")):
        load = load_of(requests, options.seconds)
        began_s = time.monotonic()
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                found[way].append(measure(way, load))
        floor, worker, servicer = (statistics.median(found[way]) for way in WAYS)
        ratio = (servicer - floor) / (worker - floor) if worker > floor else float("inf")
        if options.json:
            row = {"requests": requests, "tokens": load.tokens, "cpu_us": found, "ratio": ratio}
            print(json.dumps(row | {"seconds": time.monotonic() - began_s}), flush=True)
        else:
            print(
                f"| {requests} | {floor:.1f} | {worker:.1f} | {servicer:.1f} | {worker - floor:.1f} "
                f"| {servicer - floor:.1f} | {ratio:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
