"""``--kv-transfer-config``: which options it stands for, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cli.main import cli
from kvrelay.config.kv_transfer import KEYS, read_kv_transfer_config
from kvrelay.errors import ConfigError
from kvrelay.launch import serve as launch_serve
from kvrelay.launch import worker_process


def read(is_serve: bool = False, **keys: object) -> dict[str, object]:
    return read_kv_transfer_config(json.dumps(keys), is_serve=is_serve)


def test_a_producer_and_a_consumer() -> None:
    sizes = {
        "kv_producers_parallel_size": 2,
        "kv_producers_tensor_parallel_size": 4,
        "kv_producers_pipeline_parallel_size": 1,
        "kv_consumers_parallel_size": 3,
        "kv_consumers_tensor_parallel_size": 2,
        "kv_consumers_pipeline_parallel_size": 2,
    }
    keys = {"kv_buffer_size": "1e9", "kv_port": 21001, "http_port": 20001, "send_type": "PUT", **sizes}
    common = {"transport": "p2p", "kv_buffer_size": 10**9, "kv_port": 21001, "send_type": "PUT"}
    assert read(kv_role="kv_producer", **keys) == common | {"role": "prefill", "metrics_port": 20001, "tp": 4, "pp": 1}
    assert read(kv_role="kv_consumer", **keys) == common | {"role": "decode", "metrics_port": 20001, "tp": 2, "pp": 2}
    assert read(is_serve=True, **keys) == common | {
        "port": 20001,
        "num_prefill": 2,
        "tp_prefill": 4,
        "pp_prefill": 1,
        "num_decode": 3,
        "tp_decode": 2,
        "pp_decode": 2,
    }


def test_the_proxy_is_the_control_server() -> None:
    assert read(proxy_ip="10.0.0.1", proxy_port="4222")["control"] == "nats://10.0.0.1:4222"
    assert read(proxy_ip="fe80::1", proxy_port=4222)["control"] == "nats://[fe80::1]:4222"
    for half in ({"proxy_ip": "10.0.0.1"}, {"proxy_port": 4222}):
        with pytest.raises(ConfigError, match="go together"):
            read(**half)


def test_the_proxys_login_may_stand_before_it() -> None:
    for login in ("token", "user:p%40ss"):
        for host, shown in (("10.0.0.1", "10.0.0.1"), ("fe80::1", "[fe80::1]"), ("[fe80::1]", "[fe80::1]")):
            assert read(proxy_ip=f"{login}@{host}", proxy_port=4222)["control"] == f"nats://{login}@{shown}:4222"


@pytest.mark.parametrize(
    "proxy",
    [
        "user:secret@",
        "@h",
        "secret@h:4222",
        "user:se/secret@h",
        "secret@nats://h",
        "nats://secret@h",
        "se#secret@h",
        "a b",
    ],
)
def test_a_proxy_that_is_no_host_is_refused_without_its_login(proxy: str) -> None:
    with pytest.raises(ConfigError, match="proxy_ip must be a host") as caught:
        read(proxy_ip=proxy, proxy_port=4222)
    assert "secret" not in caught.value.message


def test_a_login_in_two_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a URL with TLS would silently become one without."""
    monkeypatch.setenv("KVRELAY_CONTROL", "tls://secret@10.0.0.1:4222?ca=cert.pem")
    with pytest.raises(ConfigError, match="leave one out") as caught:
        read(proxy_ip="secret2@10.0.0.1", proxy_port=4222)
    assert "secret" not in caught.value.message


def test_the_proxys_login_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("nats://token@10.0.0.1:4222", "tls://u:p@h1:1,tls://u:p@10.0.0.1:4222"):
        monkeypatch.setenv("KVRELAY_CONTROL", url)
        assert "control" not in read(proxy_ip="10.0.0.1", proxy_port=4222), "the environment's has the login"
        for other in ({"proxy_ip": "10.0.0.2", "proxy_port": 4222}, {"proxy_ip": "10.0.0.1", "proxy_port": 4223}):
            with pytest.raises(ConfigError, match="KVRELAY_CONTROL names another server") as caught:
                read(**other)
            assert "token" not in caught.value.message


def test_an_instances_place_is_checked_and_left_to_discovery() -> None:
    sizes = {"kv_producers_parallel_size": 1, "kv_parallel_size": 2}
    assert read(kv_role="kv_producer", kv_rank=0, **sizes) == {"transport": "p2p", "role": "prefill"}
    assert read(kv_role="kv_consumer", kv_rank="1", **sizes) == {"transport": "p2p", "role": "decode"}
    assert read(kv_rank=3) == {"transport": "p2p"}
    assert read(is_serve=True, kv_parallel_size=2) == {"transport": "p2p"}
    with pytest.raises(ConfigError, match="kv_rank 2 is no place among 2"):
        read(kv_rank=2, kv_parallel_size=2)
    with pytest.raises(ConfigError, match="one worker"):
        read(is_serve=True, kv_rank=0)


def test_keys_may_be_nested() -> None:
    nested = read(kv_connector="P2pNcclConnector", kv_connector_extra_config={"send_type": "GET", "http_port": 1})
    assert nested == {"transport": "p2p", "send_type": "GET", "metrics_port": 1}


@pytest.mark.parametrize("name", sorted(KEYS))
def test_a_misspelt_key_is_refused_with_the_nearest_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {name}"):
        read(**{name + "x": 1})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ('{"kv_connector_extra_config": 1}', "JSON object"),
        ('{"kv_role": "producer"}', "kv_producer"),
        ('{"kv_role": ["kv_producer"]}', "kv_producer"),
        ('{"send_type": "put"}', "PUT_ASYNC"),
        ('{"kv_port": 65536}', "between 0 and 65535"),
        ('{"kv_port": true}', "whole number"),
        ('{"kv_buffer_size": "much"}', "must be a number"),
        ('{"kv_buffer_size": 1.5}', "whole number"),
        ('{"kv_buffer_size": 1e999}', "whole number"),
        ('{"proxy_ip": 7, "proxy_port": 1}', "must be a text"),
    ],
)
def test_bad_values_are_refused_with_what_would_be_right(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_kv_transfer_config(text, is_serve=False)


def test_a_role_is_one_workers() -> None:
    with pytest.raises(ConfigError, match="one worker"):
        read(is_serve=True, kv_role="kv_producer")


def seen(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[Any]:
    """What the command would run."""
    options: list[Any] = []

    def run(given: Any, **_: object) -> Coroutine[Any, Any, None]:
        async def nothing() -> None:
            options.append(given)

        return nothing()

    monkeypatch.setattr(module, name, run)
    return options


@pytest.fixture
def invoke() -> Callable[..., None]:
    def call(*arguments: str) -> None:
        CliRunner().invoke(cli, [*arguments], catch_exceptions=False, standalone_mode=False)

    return call


def test_the_worker_takes_it_and_its_own_flags_win(
    monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., None]
) -> None:
    options = seen(monkeypatch, worker_process, "run_worker")
    text = '{"kv_role": "kv_producer", "send_type": "GET", "kv_buffer_size": 1, "proxy_ip": "h", "proxy_port": 1}'
    invoke("worker", "--kv-transfer-config", text, "--send-type", "PUT")
    (worker,) = options
    assert (worker.role, worker.transfer.transport, worker.control.control) == ("prefill", "p2p", "nats://h:1")
    assert (worker.transfer.send_type, worker.transfer.kv_buffer_size) == ("PUT", 1)


def test_workers_of_serve_get_a_port_each(monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., None]) -> None:
    options = seen(monkeypatch, launch_serve, "run_serve")
    invoke("serve", "--kv-transfer-config", '{"kv_port": 21001, "kv_producers_parallel_size": 2, "send_type": "GET"}')
    (served,) = options
    assert served.shape == "2P1D"
    assert [worker.transfer.kv_port for worker in served.workers] == [21001, 21002, 21003]
    assert {(worker.transfer.send_type, worker.transfer.transport) for worker in served.workers} == {("GET", "p2p")}
    invoke("serve", "--kv-port", "21001", "--prefill", "2", "--tp-prefill", "2", "--decode", "2")
    ports = [worker.transfer.kv_port for worker in options[1].workers]
    assert ports == [21001, 21005, 21009, 21010], "each rank may listen beside its worker"
