"""Numbers of a server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sd_ort.serving.dispatch import Dispatcher

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # bounds of the histogram's buckets


class Metrics:
    """What `GET /metrics` answers: counts of the dispatcher, and of requests as the server saw them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Dispatched(dispatcher))
        self._requests = Counter(
            "sd_ort_requests", "Requests for images, by status.", ["status"], registry=self.registry
        )
        self._seconds = Histogram(
            "sd_ort_request_seconds", "Seconds of a request that was answered with images.", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip

    def count(self, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(str(status)).inc()
        if status == 200:
            self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self.registry)


class _Dispatched(Collector):
    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        of, counts = self.dispatcher, self.dispatcher.counts
        yield CounterMetricFamily("sd_ort_images", "Images drawn.", counts.pictures)
        yield CounterMetricFamily("sd_ort_batches", "Batches drawn.", counts.batches)
        yield CounterMetricFamily("sd_ort_replica_restarts", "Replicas started again.", counts.restarts)
        yield GaugeMetricFamily("sd_ort_images_waiting", "Images that wait for a replica.", len(of.waiting))
        yield GaugeMetricFamily("sd_ort_replicas_ready", "Replicas that draw or could.", of.ready)
        yield GaugeMetricFamily("sd_ort_replicas", "Replicas.", len(of.replicas))
