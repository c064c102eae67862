"""The configuration file: what is refused, and that what is printed is what was read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import config
from headrace.config import Config, ModelConfig, RouterConfig
from headrace.errors import ConfigError


def test_no_file_gives_the_defaults() -> None:
    assert config.load(None) == Config()


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[router]\nhttp_address = "0.0.0.0:80"\n[worker]\nslots = 4\n')
    got = config.load(path)
    assert got.router == dataclasses.replace(RouterConfig(), http_address="0.0.0.0:80")
    assert got.worker.slots == 4
    assert got.cache == Config().cache


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[router]\nhttp_adress = 'x'", "router.http_adress: unknown key (known: cache, drain_grace_s,"),
        ("[gateway]\n", "gateway: unknown key (known: aliases, batches, cache, ledger,"),
        ("router = 5", "router: expected a table, got 5"),
        ("[worker]\nslots = 0", "worker.slots: must be at least 1, got 0"),
        ("[worker]\nslots = 5000", "worker.slots: must be at most 4096, got 5000"),
        ("[worker]\nslots = 1.5", "worker.slots: expected a whole number, got 1.5"),
        ("[worker]\nslots = true", "worker.slots: expected a whole number, got True"),
        ("[worker]\nprefix_cache = 1", "worker.prefix_cache: expected true or false, got 1"),
        (
            "[worker]\nengine = 'gpu'",
            "worker.engine: must be one of llama_cpp, tensorrt_llm, trtllm_grpc, openengine, sim",
        ),
        ("[router]\ndrain_grace_s = nan", "router.drain_grace_s: expected a finite number, got nan"),
        ("[router]\ndrain_grace_s = inf", "router.drain_grace_s: expected a finite number, got inf"),
        (f"[router]\nmax_open_requests = {10**400}", "router.max_open_requests: must be less than 2^63"),
        (f"[router]\ndrain_grace_s = {10**400}", "router.drain_grace_s: expected a number, got 1000"),
        ("[router]\nhttp_address = '8080'", "router.http_address: expected host:port, got '8080'"),
        ("[router]\nhttp_address = ''", "router.http_address: expected host:port, got ''"),
        ("[router]\nhttp_address = 'http://a:1'", "router.http_address: expected host:port"),
        ("[router]\nhttp_address = '::1:80'", "router.http_address: expected host:port"),
        ("[router]\nhttp_address = 'a:65536'", "router.http_address: port must be at most 65535, got 65536"),
        ("[router]\nhttp_address = 'a:-1'", "router.http_address: expected host:port"),
        ("[router]\nscheduler = 'a:0'", "router.scheduler: needs a real port, got 'a:0'"),
        ("[router]\nscheduler = ''", "router.scheduler: expected host:port"),
        ('[worker]\nworker_id = "a\\nb"', "worker.worker_id: must be text without control characters"),
        ("[telemetry]\notlp_endpoint = 'a:4317'", "telemetry.otlp_endpoint: expected http://host:port"),
        ("models = []", "models: at least one model is needed"),
        ("models = 'x'", "models: expected a list, got 'x'"),
        ("[[models]]\nname = 'a b'", "models[0].name: expected a name without spaces, got 'a b'"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'", "models: names must differ, got a, a"),
        ("[[models]]\nname = 'a'\nsource = ''", "models[0].source: must not be empty"),
        ("[worker]\nmodel = 'nope'", "worker.model: no model named 'nope' under [[models]] (there are: smollm2-135m)"),
        ("[worker]\nkv_tokens = 64\nblock_tokens = 128", "worker.block_tokens: must be at most worker.kv_tokens (64)"),
        ("[worker]\nkv_tokens = 64\ncontext_tokens = 65", "worker.context_tokens: must be at most worker.kv_tokens"),
        (
            "[router]\nhttp_address = 'a:1'\ngrpc_address = 'a:1'",
            "router.grpc_address: a:1 is router.http_address already",
        ),
        ("[router", "mesh.toml: "),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "mesh.toml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:8080", "router.mesh.svc:65535", "0.0.0.0:80"])
def test_addresses_that_are_right(address: str) -> None:
    assert config.parse(f"[router]\nhttp_address = '{address}'").router.http_address == address


def test_an_address_is_split_without_its_brackets() -> None:
    assert config.split_address("[::1]:8080") == ("::1", 8080)
    assert config.split_address("localhost:1") == ("localhost", 1)


def test_two_listeners_may_both_leave_the_port_to_the_system() -> None:
    config.parse("[router]\nhttp_address = '127.0.0.1:0'\ngrpc_address = '127.0.0.1:0'")


def test_an_optional_address_may_be_empty() -> None:
    assert config.parse("[router]\ncache = ''").router.cache == ""


def test_a_file_that_names_its_models_need_not_say_which_to_serve() -> None:
    got = config.parse("[[models]]\nname = 'big'\n[[models]]\nname = 'small'")
    assert got.worker.model == "big"
    assert (
        config.parse("[worker]\nmodel = 'small'\n[[models]]\nname = 'big'\n[[models]]\nname = 'small'").worker.model
        == "small"
    )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*: No such file"):
        config.load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match="cannot read configuration"):
        config.load(tmp_path / "latin.toml")


def test_overrides_win_over_the_file_and_the_file_over_the_base() -> None:
    got = config.parse(
        "[worker]\nslots = 2\nchunk_tokens = 3",
        overrides=["worker.slots=9", "router.http_address=a:1", "router.drain_grace_s=2", "worker.prefix_cache=false"],
        base={"worker.slots": "7", "worker.chunk_tokens": "7", "worker.kv_tokens": "777"},
    )
    assert (got.worker.slots, got.worker.chunk_tokens, got.worker.kv_tokens) == (9, 3, 777)
    assert got.router.http_address == "a:1"
    assert got.router.drain_grace_s == 2.0
    assert got.worker.prefix_cache is False


def test_an_override_may_have_an_equals_sign_in_its_value() -> None:
    assert config.load(None, ["worker.worker_id=a=b"]).worker.worker_id == "a=b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("worker.slots", "--set worker.slots: expected section.key=value"),
        (
            "slots=4",
            "slots: expected section.key with a section of router, scheduler, cache, worker, tensorrt_llm, telemetry",
        ),
        ("models.name=a", "models.name: expected section.key .* \\(models are listed in the file only\\)"),
        ("worker.slot=4", "worker.slot: unknown key"),
        ("worker.slots=four", "worker.slots: expected a whole number, got 'four'"),
        ("worker.slots=0", "worker.slots: must be at least 1, got 0"),
        ("router.drain_grace_s=nan", "router.drain_grace_s: expected a finite number"),
        ("worker.prefix_cache=yes", "worker.prefix_cache: expected true or false, got 'yes'"),
        ("router.http_address=x", "router.http_address: expected host:port"),
    ],
)
def test_an_override_passes_the_same_checks(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load(None, [override])


def test_every_key_has_a_meaning() -> None:
    for section in (ModelConfig(), *(getattr(Config(), item.name) for item in dataclasses.fields(Config))):
        for item in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
            assert item.metadata["meaning"]
            assert f"# {item.metadata['meaning']}" in config.to_toml(Config())


def test_the_defaults_pass_their_own_checks() -> None:
    assert config.parse(config.to_toml(Config())) == Config()


@given(
    name=st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1),
    source=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
    ratio=st.floats(0, 1),
    grace=st.floats(0, 1e18),
    slots=st.integers(1, 4096),
    prefix_cache=st.booleans(),
)
def test_what_is_printed_reads_back(
    name: str, source: str, ratio: float, grace: float, slots: int, prefix_cache: bool
) -> None:
    default = Config()
    want = Config(
        models=(ModelConfig(name, source),),
        router=dataclasses.replace(default.router, drain_grace_s=grace),
        worker=dataclasses.replace(default.worker, model=name, slots=slots, prefix_cache=prefix_cache),
        telemetry=dataclasses.replace(default.telemetry, sample_ratio=ratio),
    )
    assert config.parse(config.to_toml(want)) == want
    assert config.parse(config.to_toml(want, comments=False)) == want
