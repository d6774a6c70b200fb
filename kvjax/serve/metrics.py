"""Metrics for Prometheus. Names and meanings are vLLM's, with the prefix `kvjax:`."""

import functools
from collections.abc import Iterable
from typing import Any, Protocol

import jax
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600


class _Compilations:
    """Number of programs that this process has compiled, as JAX counts them."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float | int, **kwargs: str | int) -> None:
        self.count += event.endswith("/backend_compile_duration")


compilations = functools.cache(_Compilations)
"""Begins to count, once for the process."""


class Source(Protocol):
    """What the numbers of a moment are read from, see `kvjax.serve.serving.Server`."""

    batch: Any
    worker: Any

    @property
    def admitted(self) -> int: ...


class Metrics:
    """Metrics of a server.

    Args:
        name: name of the model.
        source: the server.
    """

    def __init__(self, name: str, source: Source) -> None:
        self._registry = CollectorRegistry()

        def labelled(kind: Any, metric: str, about: str, **more: Any) -> Any:
            made = kind(f"kvjax:{metric}", about, ["model_name"], registry=self._registry, **more)
            return made.labels(name)

        self.first_token = labelled(
            Histogram, "time_to_first_token_seconds", "Time to the first token", buckets=_SECONDS
        )
        self.ended = labelled(Histogram, "e2e_request_latency_seconds", "Time to the end", buckets=_SECONDS)
        self.prompted = labelled(Counter, "prompt_tokens", "Prompt tokens")
        self.reused = labelled(Counter, "prefix_cache_hits", "Prompt tokens whose state was stored, for each sequence")
        self.generated = labelled(Counter, "generation_tokens", "Generated tokens")
        self.rejected = labelled(Counter, "admission_rejections", "Requests refused for lack of room")
        self.cancelled = labelled(Counter, "request_cancelled", "Requests whose client has gone")
        self.finished = Counter(
            "kvjax:request_success", "Sequences that ended", ["finished_reason"], registry=self._registry
        )
        self._registry.register(_Now(name, source))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Numbers that are read when they are asked for."""

    def __init__(self, name: str, source: Source) -> None:
        self._name, self._source, self._compilations = name, source, compilations()

    def collect(self) -> Iterable[Any]:
        """Yield the metrics."""
        scheduler, batch = self._source.worker.scheduler, self._source.batch
        gauges = {
            "num_requests_running": ("Rows in use", scheduler.running),
            "num_requests_waiting": ("Sequences without a row", self._source.admitted - scheduler.running),
            "kv_cache_usage_perc": ("Rows in use, divided by all rows", scheduler.running / batch.rows),
            "row_bytes": ("Bytes of one row's cache on each device", batch.row_bytes),
            "prefix_states_on_device": ("Stored states of prompts' beginnings on the device", len(batch.prefixes)),
            "prefix_states_on_host": ("Such states in host memory", batch.prefixes.on_host),
            "prefix_host_bytes": ("Bytes of the states in host memory", batch.prefixes.stored_bytes),
        }
        for name, (about, value) in gauges.items():
            family = GaugeMetricFamily(f"kvjax:{name}", about, labels=["model_name"])
            family.add_metric([self._name], max(value, 0))
            yield family
        for name, about, value in (
            ("row_steps", "Rows times decode steps", scheduler.row_steps),
            ("row_steps_delivered", "Rows times decode steps that sampled a token", scheduler.delivered),
            ("prefix_states_restored", "States that came back from host memory", batch.prefixes.restored),
            ("compilations", "Compiled programs; none once the server is ready", self._compilations.count),
        ):
            family = CounterMetricFamily(f"kvjax:{name}", about, labels=["model_name"])
            family.add_metric([self._name], value)
            yield family
