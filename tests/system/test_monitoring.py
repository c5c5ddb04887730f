"""Each worker of a running cluster has a monitoring port of its own."""

from __future__ import annotations

import os

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, by_threshold, kvrelay_here

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

HOST = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.1"
"""An address that no other run of this test uses."""
PORT = 9400


def metrics(port: int) -> dict[str, float]:
    text = httpx.get(f"http://{HOST}:{port}/metrics", timeout=PATIENCE_S).raise_for_status().text
    families = text_string_to_metric_families(text)
    return {sample.name.removeprefix("kvrelay_worker_"): sample.value for one in families for sample in one.samples}


def test_workers_are_scraped_each_at_its_port():
    flags = ("--metrics-host", HOST, "--metrics-port", str(PORT), *by_threshold(16))
    with Serve(("--engine", "mock", *flags)) as serve:
        for port in (PORT, PORT + 1):
            assert httpx.get(f"http://{HOST}:{port}/health", timeout=PATIENCE_S).status_code == 200
            assert httpx.get(f"http://{HOST}:{port}/live", timeout=PATIENCE_S).status_code == 200
        body = {"model": serve.model, "prompt": list(range(10, 210)), "max_tokens": 5, "ignore_eos": True}
        httpx.post(f"{serve.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()
        # The answer may be complete before the prefill worker has settled its hand-off.
        until(lambda: metrics(PORT)["prefill_prefills_total"] > 0)
        prefill, decode = metrics(PORT), metrics(PORT + 1)
        (worker,) = serve.workers("prefill")
    assert prefill["ready"] == decode["ready"] == 1
    assert prefill["prefill_tokens_total"] == 200
    assert prefill["prefill_sent_bytes_total"] == decode["decode_received_bytes_total"] > 0
    assert decode["handoffs_done_total"] == worker["prefill"]["num_prefills"] == 1
    assert decode["generation_tokens_total"] == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--metrics-port", "9400", "--metrics-host", "0.0.0.0"), "reachable from other machines"),
        (("--metrics-port", "65535"), "metrics_port must be between 0 and 65535"),
    ],
)
def test_what_cannot_be_is_refused(flags: tuple[str, ...], message: str):
    done = kvrelay_here("serve", "--engine", "mock", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
