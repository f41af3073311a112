"""Metrics under vLLM's names, for dashboards, autoscalers and gateways that read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VLLM_PREFIX = "vllm:"
ENGINE_LABEL = {"engine": "0"}  # number of the engine behind the server, of which there is one
# metrics that mean the same in vLLM, and the labels that vLLM has besides `model_name` and `engine`
VLLM_METRICS: dict[str, tuple[str, ...]] = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "kv_cache_usage_perc": (),
    "cache_config_info": ("block_size", "num_gpu_blocks"),
    "prefix_cache_queries": (),
    "prefix_cache_hits": (),
    "prompt_tokens": (),
    "generation_tokens": (),
    "request_success": ("finished_reason",),
    "time_to_first_token_seconds": (),
    "inter_token_latency_seconds": (),
    "e2e_request_latency_seconds": (),
    "request_queue_time_seconds": (),
    "request_prefill_time_seconds": (),
    "request_decode_time_seconds": (),
    "spec_decode_num_drafts": (),
    "spec_decode_num_draft_tokens": (),
    "spec_decode_num_accepted_tokens": (),
    "spec_decode_num_accepted_tokens_per_pos": ("position",),
}
EARLIER_NAMES = {  # earlier names in vLLM, which its production stack and older endpoint pickers read
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}


class VllmNames(Collector):
    """Collector that repeats the metrics of a registry under vLLM's names, in a registry of its own. Values that differ
    in labels that vLLM does not have are added."""

    def __init__(self, source: CollectorRegistry, prefix: str, model_label: str) -> None:
        """`prefix`: of the names in `source`. `model_label`: the label that both have."""
        self._source, self._prefix, self._model_label = source, prefix, model_label

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            name = metric.name.removeprefix(self._prefix)
            if name in VLLM_METRICS:
                yield self._renamed(metric, name, name)
            if name in EARLIER_NAMES:
                yield self._renamed(metric, name, EARLIER_NAMES[name])

    def _renamed(self, metric: Metric, name: str, new_name: str) -> Metric:
        """Returns a copy of the metric `name` with `new_name`, both without prefix."""
        kept = {self._model_label, "le", *VLLM_METRICS[name]}
        values = defaultdict[tuple[str, tuple[tuple[str, str], ...]], float](float)
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                labels = {key: value for key, value in sample.labels.items() if key in kept}
                values[sample.name, (*labels.items(),)] += sample.value
        renamed = Metric(VLLM_PREFIX + new_name, metric.documentation, metric.type)
        renamed.samples = [
            Sample(
                VLLM_PREFIX + new_name + own.removeprefix(self._prefix + name),
                {**dict(labels), **ENGINE_LABEL},
                value,
            )
            for (own, labels), value in values.items()
        ]
        return renamed
