"""Models' shapes and GPUs' figures: what fits into memory, and what a step takes there.

Known ones are in ``catalogue.json``. What a step takes comes from the cost table that was measured for the model on the
GPU; where there is none, a table is made from the roofline: weights read at the memory's rate or multiplied at the
arithmetic's, whichever is longer. Either way it is one cost table, read by the same Rust code as the scheduler's and
the simulator's. Planning a fleet is ``plan.py``'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from headrace._gateway import CostTable, cost_tables
from headrace.errors import ConfigError

#: Bytes of a weight; a scale and a zero for each 128 weights come with 4 bits.
WEIGHTS = {"fp16": 2.0, "fp8": 1.0, "int4": 0.52}
#: Bytes of a value in KV.
KV = {"fp16": 2.0, "fp8": 1.0}

#: Share of a GPU's memory for weights and KV; the rest is the engine's.
MEMORY_SHARE = 0.9

#: What engines reach of a data sheet's rates, and what a layer takes beside. Fitted to the measured tables, from which
#: the roofline is then off by 12% (median) to 41% (one row in ten is worse).
ACHIEVED_BANDWIDTH = 0.75
ACHIEVED_FLOPS = 0.6
LAYER_S = 20e-6
#: Attention's, as the measured tables derive it.
ATTENTION_BANDWIDTH = 0.7
ATTENTION_FLOPS = 0.5
#: An all-reduce: measured on DGX machines at small sizes, and the share of one direction's rate at large ones.
ALL_REDUCE_S = 49e-6
ACHIEVED_LINK = 0.6

#: Rows of a table made from the roofline.
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class Shape:
    """A model's shape, as far as memory and time depend on it."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: float
    #: Values that a token's KV has in each layer.
    kv_values: int
    parameters: float
    #: Parameters that one token is multiplied with.
    active_parameters: float
    #: Parameters of tables that are looked up, not multiplied with.
    embedding_parameters: float
    #: Share of a layer's experts that one token uses; 1 for a dense model.
    expert_share: float = 1.0

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> Shape:
        """From a model's ``config.json``. Raises ConfigError for what is missing."""

        def number(key: str, default: float | None = None) -> float:
            value = config.get(key, default)
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"model {name}: {key} must be a number above 0 (is {value})")
            return float(value)

        layers, hidden = int(number("num_hidden_layers")), int(number("hidden_size"))
        heads = int(number("num_attention_heads"))
        kv_heads = int(number("num_key_value_heads", heads))
        head_dim = number("head_dim", hidden / heads)
        embedding = number("vocab_size") * hidden
        experts = number("num_experts", config.get("num_local_experts") or config.get("n_routed_experts") or 1)
        share = number("num_experts_per_tok") / experts if experts > 1 else 1.0
        kv_values = int(2 * kv_heads * head_dim)
        if "kv_lora_rank" in config:
            # Latent attention: one vector for all heads, and each GPU has it whole.
            kv_heads, kv_values = 1, int(number("kv_lora_rank") + number("qk_rope_head_dim"))
            head_dim = (number("qk_nope_head_dim") + number("qk_rope_head_dim") + number("v_head_dim")) / 2
            parameters, active = number("parameters"), number("active_parameters") - embedding
        else:
            width = number("moe_intermediate_size", config.get("intermediate_size")) if experts > 1 else 0.0
            mlp = 3 * hidden * (width or number("intermediate_size"))
            attention = 2 * hidden * head_dim * (heads + kv_heads)
            tables = 1 if config.get("tie_word_embeddings") else 2
            parameters = layers * (attention + mlp * experts) + embedding * tables
            active = layers * (attention + mlp * experts * share)
        return cls(name, layers, hidden, heads, kv_heads, head_dim, kv_values, parameters, active, embedding, share)

    def weight_bytes(self, weights: str) -> float:
        """All of them."""
        return self.parameters * WEIGHTS[weights]

    def read_bytes(self, weights: str, tokens: int) -> float:
        """Those that a step of so many tokens reads: of experts, only those that some token uses."""
        unused = self.parameters - self.embedding_parameters - self.active_parameters
        experts = unused / (1 - self.expert_share) if self.expert_share < 1 else 0.0
        untouched = experts * (1 - self.expert_share) ** tokens
        return (self.parameters - untouched) * WEIGHTS[weights]

    def kv_bytes_per_token(self, kv: str) -> float:
        """Over all layers, once."""
        return self.layers * self.kv_values * KV[kv]

    def kv_copies(self, tensor_parallel: int) -> float:
        """How often GPUs that share a worker hold the same KV: they can't split a head."""
        return max(1.0, tensor_parallel / self.kv_heads)

    def same(self, other: Shape) -> bool:
        """Whether all but the name is equal."""
        return replace(self, name=other.name) == other


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, by its data sheet."""

    name: str
    memory_gb: float
    bandwidth_tb_per_s: float
    fp16_tflops: float
    #: Both directions together.
    link_gb_per_s: float
    usd_per_hour: float
    #: 0 = it multiplies FP8 at FP16's rate.
    fp8_tflops: float = 0.0

    @classmethod
    def of(cls, name: str, figures: Mapping[str, Any]) -> Gpu:
        """From a table of figures. Raises ConfigError."""
        known = {key for key in cls.__dataclass_fields__ if key != "name"}
        for key in sorted(known | figures.keys()):
            if key not in known:
                raise ConfigError(f"GPU {name}: there is no {key}; there are {', '.join(sorted(known))}")
            value = figures.get(key, 0 if key == "fp8_tflops" else None)
            if not isinstance(value, int | float) or isinstance(value, bool) or value < (key != "fp8_tflops") * 1e-9:
                raise ConfigError(f"GPU {name}: {key} must be a number above 0 (is {value})")
        return cls(name, **{key: float(value) for key, value in figures.items()})

    def flops(self, weights: str) -> float:
        """A second, by the data sheet; 4-bit weights are multiplied as FP16."""
        return max(self.fp16_tflops, self.fp8_tflops if weights == "fp8" else 0.0) * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes of memory a second."""
        return self.bandwidth_tb_per_s * 1e12


@cache
def catalogue() -> dict[str, Any]:
    """Known models and GPUs with their sources, as in ``catalogue.json``."""
    text = resources.files("headrace").joinpath("catalogue.json").read_text(encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


def find_shape(name: str) -> Shape:
    """A known model, or a file like ``config.json``. Raises ConfigError."""
    return Shape.of(*_find(name, "models", "--model"))


def find_gpu(name: str) -> Gpu:
    """A known GPU, or a file with the catalogue's keys. Raises ConfigError."""
    return Gpu.of(*_find(name, "gpus", "--gpu"))


def _find(name: str, kind: str, option: str) -> tuple[str, Mapping[str, Any]]:
    if name.endswith(".json"):
        try:
            read = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{option}: {name}: {error}") from error
        if not isinstance(read, dict):
            raise ConfigError(f"{option}: {name} is not a JSON object")
        return Path(name).stem, read
    known = catalogue()[kind]
    if name not in known:
        raise ConfigError(f"{option}: there is no {name}; there are {', '.join(known)} (or a .json file of your own)")
    return name, known[name]


def weights_read_s(shape: Shape, weights: str, bandwidth: float) -> float:
    """The textbook's least time for a token at batch 1: all weights read once, at full rate."""
    return shape.weight_bytes(weights) / bandwidth


def _roofline(shape: Shape, gpu: Gpu, tensor_parallel: int, weights: str, kv: str) -> dict[str, Any]:
    """A cost table by arithmetic."""
    hidden_bytes, turns = shape.hidden * 2.0, 2.0 * (tensor_parallel - 1) / tensor_parallel

    def step_s(tokens: int) -> float:
        read_s = shape.read_bytes(weights, tokens) / (tensor_parallel * gpu.bandwidth * ACHIEVED_BANDWIDTH)
        flops = tensor_parallel * gpu.flops(weights) * ACHIEVED_FLOPS
        compute_s = 2 * shape.active_parameters * tokens / flops
        link = gpu.link_gb_per_s * 1e9 / 2 * ACHIEVED_LINK
        reduce_s = max(ALL_REDUCE_S, turns * tokens * hidden_bytes / link) if tensor_parallel > 1 else 0.0
        return max(read_s, compute_s) + shape.layers * (LAYER_S + 2 * reduce_s)

    kv_bytes = shape.kv_bytes_per_token(kv) * shape.kv_copies(tensor_parallel)
    free = MEMORY_SHARE * gpu.memory_gb * 1e9 * tensor_parallel - shape.weight_bytes(weights)
    pair_flops = 4 * shape.heads * shape.head_dim * shape.layers
    return {
        "name": f"{gpu.name}-{shape.name}-tp{tensor_parallel}-{weights}",
        "gpu": gpu.name,
        "model": shape.name,
        "tensor_parallel": tensor_parallel,
        "source": "roofline",
        "step_ms": [(tokens, step_s(tokens) * 1e3) for tokens in ROWS],
        "attention_pair_ms": pair_flops / (tensor_parallel * gpu.flops("fp16") * ATTENTION_FLOPS) * 1e3,
        "context_token_ms": kv_bytes / (tensor_parallel * gpu.bandwidth * ATTENTION_BANDWIDTH) * 1e3,
        "kv_tokens": max(0, int(free / kv_bytes)),
    }


def _measured(shape: Shape, gpu: Gpu, tensor_parallel: int) -> dict[str, Any] | None:
    """The table that was measured for this shape on this GPU, if one was."""
    for table in json.loads(cost_tables()):
        known = catalogue()["models"].get(table["model"].lower())
        if (
            known is not None
            and table["gpu"].lower().replace(" ", "-") == gpu.name
            and table["tensor_parallel"] == tensor_parallel
            and Shape.of(shape.name, known).same(shape)
        ):
            found: dict[str, Any] = table
            return found
    return None


def _at(rows: Sequence[tuple[int, float]], tokens: int) -> float:
    table = {**EMPTY_TABLE, "step_ms": rows}
    return CostTable.parse(json.dumps(table)).step_s(tokens, 0)


#: A table without times, to be filled.
EMPTY_TABLE: dict[str, Any] = {
    "name": "rows",
    "gpu": "",
    "model": "",
    "tensor_parallel": 1,
    "source": "",
    "attention_pair_ms": 0,
    "context_token_ms": 0,
    "kv_tokens": 1,
}


def cost_table(shape: Shape, gpu: Gpu, tensor_parallel: int, weights: str, kv: str) -> dict[str, Any]:
    """What steps take there, as a cost table's JSON; ``source`` says whence.

    A measured table is of FP16. For other precisions it is scaled by what the roofline says that they change.
    """
    roofline = _roofline(shape, gpu, tensor_parallel, weights, kv)
    measured = _measured(shape, gpu, tensor_parallel)
    if measured is None:
        return roofline
    if (weights, kv) == ("fp16", "fp16"):
        return {**measured, "source": f"measured: {measured['name']}"}
    plain = _roofline(shape, gpu, tensor_parallel, "fp16", "fp16")
    rows: list[tuple[int, float]] = []
    for tokens, ms in measured["step_ms"]:
        scaled = ms * _at(roofline["step_ms"], tokens) / _at(plain["step_ms"], tokens)
        rows.append((tokens, max(scaled, rows[-1][1] if rows else 0.0)))
    kv_bytes = shape.kv_bytes_per_token("fp16") * shape.kv_copies(tensor_parallel)
    saved = shape.weight_bytes("fp16") - shape.weight_bytes(weights)
    return {
        **measured,
        "name": roofline["name"],
        "source": f"measured: {measured['name']}, scaled to {weights} weights and {kv} KV by the roofline",
        "step_ms": rows,
        "context_token_ms": measured["context_token_ms"] * KV[kv] / KV["fp16"],
        "kv_tokens": int((measured["kv_tokens"] * kv_bytes + saved) / (kv_bytes * KV[kv] / KV["fp16"])),
    }


@dataclass(frozen=True)
class Worker:
    """One worker: a model on so many GPUs."""

    shape: Shape
    gpu: Gpu
    tensor_parallel: int = 1
    weights: str = "fp16"
    kv: str = "fp16"
    #: Answers under way at once, at most.
    max_batch: int = 256
    #: Tokens guessed for each answer in a step, and how likely each is right if those before it are.
    draft_tokens: int = 0
    accepted: float = 0.0

    @cached_property
    def table(self) -> dict[str, Any]:
        """Its cost table."""
        return cost_table(self.shape, self.gpu, self.tensor_parallel, self.weights, self.kv)

    @cached_property
    def costs(self) -> CostTable:
        """The same, to ask."""
        return CostTable.parse(json.dumps(self.table))

    @property
    def fits(self) -> bool:
        """Whether the weights leave room for any KV."""
        return bool(self.table["kv_tokens"] > 0)

    @property
    def advance(self) -> float:
        """Tokens that each answer gets from a step, in the mean."""
        return math.fsum(self.accepted**guess for guess in range(self.draft_tokens + 1))

    @property
    def usd_per_hour(self) -> float:
        """Its GPUs'."""
        return self.tensor_parallel * self.gpu.usd_per_hour
