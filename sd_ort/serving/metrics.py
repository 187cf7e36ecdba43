"""Metrics of a server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sd_ort.serving.dispatch import Dispatcher

BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # bounds of the histogram's buckets


class Metrics:
    """Metrics of `GET /metrics`: counts of the dispatcher and of the server's requests."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_DispatcherCollector(dispatcher))
        self._requests = Counter(
            "sd_ort_requests", "Requests for images by HTTP status.", ["status"], registry=self.registry
        )
        self._seconds = Histogram(
            "sd_ort_request_seconds", "Seconds of a successful request for images.", buckets=BUCKETS_S,
            registry=self.registry,
        )  # fmt: skip

    def count(self, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(str(status)).inc()
        if status == 200:
            self._seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _DispatcherCollector(Collector):
    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        dispatcher, counts = self.dispatcher, self.dispatcher.counts
        yield CounterMetricFamily("sd_ort_images", "Generated images.", counts.images)
        yield CounterMetricFamily("sd_ort_batches", "Generated batches.", counts.batches)
        yield CounterMetricFamily("sd_ort_replica_restarts", "Restarts of replicas.", counts.restarts)
        yield GaugeMetricFamily("sd_ort_images_waiting", "Images waiting for a replica.", len(dispatcher.waiting))
        yield GaugeMetricFamily("sd_ort_replicas_ready", "Replicas that are idle or generating.", dispatcher.ready)
        yield GaugeMetricFamily("sd_ort_replicas", "Replicas.", len(dispatcher.replicas))
