"""``docs/operations.md`` is true: each of its commands is run, in order, on loopback addresses in place of machines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests import nursery
from tests.control.etcd_server import require_etcd
from tests.patience import PATIENCE_S
from tests.system.documents import Command, File, steps_of
from tests.system.serving import run_to_its_end

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.workers import WorkerInfo
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import ControlUnavailableError, WorkerUnavailableError
from kvrelay.launch.worker_calls import list_workers
from kvrelay.rpc import ZmqRpcClient, new_curve_keys

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SERVERS = ("nats-server", "etcd", "kvrelay worker", "kvrelay frontend")
FAST = ["--lease-ttl-s", "2", "--connect-timeout-s", "20"]


class Operator:
    """Does what the page says, in a directory of its own; ends whatever it has started."""

    def __init__(self, directory: Path) -> None:
        # A network that no other run of this test uses.
        self.network = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}."
        self.directory = directory
        self.variables: dict[str, str] = {}
        self.processes: list[nursery.Process] = []
        self.started: dict[str, nursery.Process] = {}
        self.prefill_workers: list[nursery.Process] = []
        self.env = {"XDG_RUNTIME_DIR": str(directory), "XDG_STATE_HOME": str(directory)}
        (directory / "model").symlink_to(bundled_checkpoint_path())

    def run(self, step: File | Command) -> str:
        """One file or command; gives what a finished command has printed."""
        if isinstance(step, File):
            (self.directory / step.name).write_text(step.text)
            return ""
        words = step.words(self.variables)
        if words[0] == "export":
            self.env.update(word.split("=", 1) for word in words[1:])
            return ""
        name = " ".join(words[:2]) if words[0] == "kvrelay" else words[0]
        command = self._command(words, name)
        if name in SERVERS:
            self._start(command, name)
            return ""
        return self.finish(command)

    def _command(self, words: list[str], name: str) -> list[str]:
        if words[0] == "curl":
            words[1:1] = ["--silent", "--fail"]
        if words[0] != "kvrelay":
            beside = Path(sysconfig.get_path("scripts")) / words[0]
            return [str(beside) if beside.exists() else words[0], *words[1:]]
        extra = {"kvrelay worker": ["--engine", "mock", *FAST], "kvrelay frontend": FAST}.get(name, [])
        return [sys.executable, "-m", "kvrelay", *words[1:], *extra]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def finish(self, command: list[str]) -> str:
        """Run it, again while it fails: servers need a moment, and a client may be ahead of them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = run_to_its_end(command, 2 * PATIENCE_S, cwd=self.directory, env=self._environment())
            if done.returncode == 0:
                return done.stdout
            assert time.monotonic() < deadline, f"{command}: {done.stdout} {done.stderr}\n{self.logs()}"
            time.sleep(0.2)

    def _start(self, command: list[str], name: str) -> None:
        known = set(self.worker_ids()) if name == "kvrelay worker" else set()
        with self.log(len(self.processes)).open("wb") as log:
            started = nursery.popen(command, cwd=self.directory, env=self._environment(), stdout=log, stderr=log)
        self.processes.append(started)
        if name == "kvrelay worker":
            self.until(lambda: set(self.worker_ids()) - known)
            (new,) = set(self.worker_ids()) - known
            role = command[command.index("--role") + 1]
            self.variables[f"{role.upper()}_WORKER"] = new
            self.prefill_workers += [started] if role == "prefill" else []
            self.started[new] = started

    def worker_ids(self) -> list[str]:
        """Faster than ``kvrelay status``, but for etcd."""
        if "KVRELAY_DISCOVERY" in self.env:
            return [str(worker["worker_id"]) for worker in self.status()["workers"]]
        return [worker.worker_id for worker in asyncio.run(workers_of(self))]

    def status(self) -> dict[str, list[dict[str, object]]]:
        return json.loads(self.finish([sys.executable, "-m", "kvrelay", "status", "--json"]))

    def until(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert all(process.poll() in (None, 0) for process in self.processes), self.logs()
            time.sleep(0.1)

    def log(self, number: int) -> Path:
        return self.directory / f"{number}.log"

    def logs(self) -> str:
        return "\n".join(self.log(n).read_text(errors="replace")[-1500:] for n in range(len(self.processes)))

    def end(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    require_etcd()
    for tool in ("openssl", "curl"):
        if shutil.which(tool) is None:
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{tool} is not installed")
    one = Operator(tmp_path)
    yield one
    one.end()


def test_the_page_is_true(operator: Operator) -> None:
    commands = []
    for step in steps_of(PAGE, {"10.0.0.": operator.network}):
        printed = operator.run(step)
        if isinstance(step, Command):
            commands.append(step.line)
            check(operator, step.line, printed)
    assert len(commands) > 25
    assert [worker.wait(PATIENCE_S) for worker in operator.prefill_workers] == [0]


def check(operator: Operator, line: str, printed: str) -> None:
    """What the page promises of a command."""
    if line.startswith("kvrelay api-key"):
        key, hashed = re.fullmatch(r"key:  (\S+)\nline: (alice:\w{64} max_prompt_tokens=8192 \S+)\n", printed).groups()
        operator.variables["KEY"] = key
        (operator.directory / "api-keys").write_text(hashed + "\n")
    elif line.startswith("curl") and "$KEY" in line:
        assert json.loads(printed)["usage"]["completion_tokens"] == 8
        nobody_else_gets_in(operator)
    elif line.startswith("kvrelay config get"):
        assert printed == 'disagg.disagg_policy "threshold"\ndisagg.max_local_prefill_length 512\n'
    elif line.startswith("kvrelay config unset disagg.disagg_policy"):
        assert operator.finish([sys.executable, "-m", "kvrelay", "config", "get"]) == ""
    elif line.startswith("kvrelay role"):
        role = line.rsplit(maxsplit=1)[-1]
        (worker,) = [w for w in operator.status()["workers"] if w["worker_id"] == operator.variables["PREFILL_WORKER"]]
        assert worker["role"] == role
    elif line.startswith("kvrelay drain"):
        operator.until(lambda: operator.variables["PREFILL_WORKER"] not in operator.worker_ids())
    elif "lease revoke" in line:
        worker_id = operator.variables["DECODE_WORKER"]
        operator.until(lambda: worker_id not in operator.worker_ids())
        assert operator.started[worker_id].wait(PATIENCE_S) == 0
    elif line.startswith("etcdctl --user"):
        worker_id = operator.variables["DECODE_WORKER"]
        assert f"kvrelay/default/workers/{worker_id}" in printed
        assert f"kvrelay/default/kv_metadata/{worker_id}/0" in printed
        (worker,) = operator.status()["workers"]
        operator.variables["DECODE_LEASE"] = worker["lease_id"]


def nobody_else_gets_in(operator: Operator) -> None:
    """Neither without a key, nor without the control plane's password, nor without a worker's public key, nor with a
    key of one's own that discovery does not have."""
    trust = ssl.create_default_context(cafile=str(operator.directory / "cert.pem"))
    with httpx.Client(base_url=f"https://{operator.network}4:8443", verify=trust, timeout=PATIENCE_S) as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 401
    without = operator.env["KVRELAY_CONTROL"].replace("kvrelay:NATS_PASSWORD@", "")
    with pytest.raises(ControlUnavailableError, match="cannot connect"):
        asyncio.run(connect(operator, without))
    asyncio.run(no_worker_answers(operator))


async def connect(operator: Operator, urls: str) -> ControlPlane:
    urls = urls.replace("ca=", f"ca={operator.directory}/")
    return await connect_control(ControlConfig(control=urls, connect_timeout_s=20.0))


async def workers_of(operator: Operator) -> list[WorkerInfo]:
    """Again while it fails: servers that have just started elect their leader first."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                control = await connect(operator, operator.env["KVRELAY_CONTROL"])
                try:
                    return await list_workers(control, Keys("default"))
                finally:
                    await control.close()
            except ControlUnavailableError:
                await asyncio.sleep(0.2)


async def no_worker_answers(operator: Operator) -> None:
    workers = await workers_of(operator)
    assert len(workers) == 2
    for worker in workers:
        assert worker.public_key
        for key in (None, new_curve_keys().public, worker.public_key.encode()):
            with pytest.raises(WorkerUnavailableError):
                await ZmqRpcClient(worker.address, connect_timeout_s=2.0, server_key=key).start()
