"""Wrong arguments and broken surroundings: one clear line on stderr, the right exit code, nothing left running."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from tests.system.serving import kvrelay, kvrelay_here

from kvrelay.control.nats_process import NatsServerProcess
from kvrelay.errors import AddressInUseError, ControlUnavailableError
from kvrelay.executors.torch.checkpoints import make_model

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, "llama", "tiny")
    return path


def refused(*arguments: str, code: int = 2) -> str:
    """Run a command that must fail; gives its one line."""
    return line_of(kvrelay(*arguments, timeout_s=180), code)


def line_of(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr
    assert len(lines) <= 2, done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--prefil", "1"], "--prefill"),
        (["serve", "--log-level", "debug"], "kvrelay --log-level debug serve"),
        (["serve", "--port", "99999"], "99999"),
        (["serve", "--dtype", "int4"], "int4"),
        (["serve", "--min-workers", "0"], "give --max-workers, too"),
        (["serve", "--block-size", "0"], "block_size must be between 1 and 1024"),
        (["serve", "/does/not/exist"], "/does/not/exist does not exist"),
        (["serve", "--config", "/does/not/exist.yaml"], "exist.yaml"),
        (["worker", "--role", "nurse"], "nurse"),
        (["worker"], "--control"),
        (["frontend"], "--control"),
        (["serve", "--host", "0.0.0.0"], "--api-keys-file"),
        (["serve", "--control", "nats://10.0.0.1:4222"], "without credentials"),
        (["serve", "--tls-cert", "cert.pem"], "give both or none"),
        (["frontend", "--host", "10.0.0.1", "--control", "nats://127.0.0.1:4222"], "--insecure"),
        (["frontend", "--port", "0", "--control", "nats://10.0.0.1:4222"], "without credentials"),
        (["status", "--control", "nats://10.0.0.1:4222"], "without credentials"),
        (["status", "--control", "127.0.0.1:4222"], "is not a URL: expected nats://HOST:PORT"),
        (["status", "--control", "nats://t@127.0.0.1:1", "--discovery", "etcd://10.0.0.1:2379"], "without credentials"),
        (["status", "--control", "tls://t@127.0.0.1:1?ca=/does/not/exist.pem"], "cannot read /does/not/exist.pem"),
        (
            ["worker", "--worker-host", "10.0.0.1", "--request-plane-security", "none", "--control", "nats://t@h:1"],
            "without CURVE",
        ),
        (["api-key", "a:b"], "is not a key name"),
        (["api-key", "a", "--max-output-tokens", "0"], "at least 1"),
        (["sing"], "sing"),
        (["config", "set", "disagg.max_local_prefil_length", "5"], "did you mean disagg.max_local_prefill_length"),
        (["config", "set", "disagg.max_local_prefill_length", "many"], "must be int"),
        (["config", "get", "disagg.max_local_prefil_length"], "did you mean disagg.max_local_prefill_length"),
        (["config", "unset", "disagg.max_local_prefil_length"], "did you mean disagg.max_local_prefill_length"),
        (["make-model", "/tmp/kvrelay-never-made", "--arch", "gpt5"], "gpt5"),
        (["bench", "engine", "--num-prompts", "0"], "num-prompts"),
        (["simulate", "--time-scale", "nan"], "'--time-scale': nan is not a number"),
        (["advise", "--slo-ttft-ms", "nan"], "'--slo-ttft-ms': nan is not a number"),
        (["evaluate", "--price", "nan"], "'--price': nan is not a number"),
        (["planner", "--interval", "nan"], "'--interval': nan is not a number"),
        (["status", "--lease-ttl-s", "nan"], "'--lease-ttl-s': nan is not a number"),
        (["bench", "serve", "--temperature", "nan"], "'--temperature': nan is not a number"),
        (["bench", "serve", "--vocab-size", "99999999999999999999"], "'--vocab-size': 99999999999999999999 is not in"),
        (
            ["bench", "serve", "--num-prompts", "99999999999999999999"],
            "'--num-prompts': 99999999999999999999 is not in",
        ),
        (["bench", "serve", "--max-concurrency", "10000001"], "'--max-concurrency': 10000001 is not in"),
        (["bench", "serve", "--burstiness", "0"], "'--burstiness': 0.0 is not in"),
        (["bench", "serve", "--time-scale", "-1"], "'--time-scale': -1.0 is not in"),
        (["bench", "sweep", "--drain", "-1"], "'--drain': -1.0 is not in"),
        (["bench", "interference", "--warm-up", "99999999999999999999"], "'--warm-up': 99999999999999999999 is not in"),
        (["bench", "prefixes", __file__, "--cache-blocks", "nan"], "--cache-blocks 'nan' is not a list of numbers"),
        (
            ["bench", "sweep", "--case", "a=http://127.0.0.1:1", "--rates", "inf"],
            "--rates 'inf' is not a list of numbers",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    assert message in line_of(kvrelay_here(*arguments))


def test_wrong_arguments_end_the_process():
    assert "--prefill" in line_of(kvrelay("serve", "--prefil", "1", is_real=True))


def test_a_control_server_that_is_not_there():
    control, code = ("--control", "nats://127.0.0.1:1", "--connect-timeout-s", "0.2"), ControlUnavailableError.exit_code
    for command in (["status"], ["drain", "x"], ["revoke-lease", "x"], ["config", "get"]):
        assert "127.0.0.1:1" in line_of(kvrelay_here(*command, *control), code)
    for command in (["worker"], ["frontend", "--port", "0"]):
        assert "127.0.0.1:1" in refused(*command, *control, code=code)


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("serve", "--port", str(port), code=AddressInUseError.exit_code)
        assert f"127.0.0.1:{port}" in line
        assert "choose another port" in line


def test_a_network_device_that_is_not_there():
    server = NatsServerProcess()
    try:
        command = ("worker", "--engine", "mock", "--control", server.start(), "--ucx-net-devices", "no-device")
        assert "UCX_NET_DEVICES=no-device (--ucx-tls, --ucx-net-devices)" in refused(*command, code=1)
    finally:
        server.stop()


def test_a_directory_that_is_no_checkpoint(tmp_path):
    assert "config.json" in refused("serve", str(tmp_path))


def test_a_truncated_checkpoint(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    assert "safetensors" in line_of(kvrelay_here("bench", "engine", str(broken), "--num-prompts", "1"))


def test_an_architecture_that_is_not_supported(checkpoint, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoint.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = (other / "config.json").read_text().replace("LlamaForCausalLM", "MambaForCausalLM")
    (other / "config.json").write_text(config)
    assert "MambaForCausalLM" in line_of(kvrelay_here("bench", "engine", str(other), "--num-prompts", "1"))
