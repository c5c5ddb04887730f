"""Our metrics under vLLM's names, for dashboards and autoscalers that know only those (``--vllm-metric-names``).

Only those that mean the same are here. Each is told by one kind of process, so that a sum over all of them is right:
by frontends what a client sees, by workers what an engine does.

Source: vLLM 0.32, ``vllm/v1/metrics/loggers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

OF_FRONTENDS = {
    "kvrelay_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "kvrelay_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "kvrelay_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "kvrelay_prompt_tokens": "vllm:prompt_tokens",
    "kvrelay_cached_prompt_tokens": "vllm:prompt_tokens_cached",
    "kvrelay_generation_tokens": "vllm:generation_tokens",
}
OF_WORKERS = {
    "kvrelay_worker_requests_running": "vllm:num_requests_running",
    "kvrelay_worker_requests_waiting": "vllm:num_requests_waiting",
    "kvrelay_worker_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "kvrelay_worker_prefix_cache_query_tokens": "vllm:prefix_cache_queries",
    "kvrelay_worker_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "kvrelay_worker_preemptions": "vllm:num_preemptions",
    "kvrelay_worker_prefill_seconds": "vllm:request_prefill_time_seconds",
    "kvrelay_worker_spec_decode_drafts": "vllm:spec_decode_num_drafts",
    "kvrelay_worker_spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "kvrelay_worker_spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
ENGINE = "0"
"""vLLM numbers the engines behind one server. Each of our processes is one."""


class WithVllmNames(Collector):
    """What another collector tells, and after each family its copy with vLLM's name and labels, if it has one."""

    def __init__(self, collector: Collector, names: Mapping[str, str]) -> None:
        self._collector = collector
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._collector.collect():
            yield family
            if family.name in self._names:
                yield _copy(family, self._names[family.name])


def _copy(family: Metric, name: str) -> Metric:
    copy = Metric(name, f"{family.documentation} The same as {family.name}.", family.type)
    for sample in family.samples:
        labels = {"model_name" if label == "model" else label: value for label, value in sample.labels.items()}
        labels["engine"] = ENGINE
        copy.samples.append(sample._replace(name=sample.name.replace(family.name, name, 1), labels=labels))
    return copy
