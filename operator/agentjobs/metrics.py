"""Prometheus metrics: one object per fact, labels bounded by our own words."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

OPEN_METRICS = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """All metrics of one operator process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.leader = Gauge(
            "agentjobs_leader", "1 while this process leads.", registry=self.registry
        )
        self.jobs = Gauge(
            "agentjobs_jobs",
            "AgentJobs by whether they are over.",
            ["phase"],
            registry=self.registry,
        )
        self.queue = Gauge(
            "agentjobs_queue_length", "AgentJobs that wait for a pass.", registry=self.registry
        )
        self.passes = Counter(
            "agentjobs_passes", "Passes by outcome.", ["outcome"], registry=self.registry
        )
        self.pass_seconds = Histogram(
            "agentjobs_pass_seconds", "Seconds of a pass.", buckets=SECONDS, registry=self.registry
        )
        self.writes = Counter(
            "agentjobs_writes", "Writes to the API server by what was done.", ["action"],
            registry=self.registry,
        )  # fmt: skip
        self.watch_events = Counter(
            "agentjobs_watch_events", "Watch events by kind.", ["kind"], registry=self.registry
        )
        self.watch_silence = Gauge(
            "agentjobs_watch_silence_seconds",
            "Since the API server was last heard on a resource, by a watch or a list.",
            ["resource"], registry=self.registry,
        )  # fmt: skip
        self.repaired = Counter(
            "agentjobs_repaired", "Objects that only the periodic list showed.", ["kind"],
            registry=self.registry,
        )  # fmt: skip
        self.finished = Counter(
            "agentjobs_finished", "Ends by state and cause.", ["state", "cause"],
            registry=self.registry,
        )  # fmt: skip
        self.start_seconds = Histogram(
            "agentjobs_start_seconds", "From creation to the tool's start.", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.end_seconds = Histogram(
            "agentjobs_end_seconds", "From the tool's end to the terminal status.", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.deliveries = Counter(
            "agentjobs_deliveries", "Tries to deliver an event by what came of them.", ["outcome"],
            registry=self.registry,
        )  # fmt: skip
        self.delivery_seconds = Histogram(
            "agentjobs_delivery_seconds", "Seconds of a try to deliver an event.", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.deliveries_waiting = Gauge(
            "agentjobs_deliveries_waiting", "Events that are due and wait for their turn.",
            registry=self.registry,
        )  # fmt: skip
        self.deliveries_under_way = Gauge(
            "agentjobs_deliveries_under_way", "Tries to deliver an event, by lane.", ["lane"],
            registry=self.registry,
        )  # fmt: skip
        self.destinations = Gauge(
            "agentjobs_destinations", "Destinations that get nothing, or one try at a time.",
            ["standing"], registry=self.registry,
        )  # fmt: skip
        self.events = Counter(
            "agentjobs_events", "Events to agent runtimes that are settled, by type and state.",
            ["type", "state"], registry=self.registry,
        )  # fmt: skip
        self.told_seconds = Histogram(
            "agentjobs_told_seconds", "From the end of a job until its receiver has the event.",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.streams = Gauge(
            "agentjobs_output_streams", "Containers whose output is followed.",
            registry=self.registry,
        )  # fmt: skip
        self.events_dropped = Counter(
            "agentjobs_events_dropped", "Kubernetes Events that were not sent.",
            registry=self.registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class GatewayMetrics:
    """All metrics of one gateway process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "agentjobs_gateway_requests", "Requests by operation and status code.",
            ["operation", "code"], registry=self.registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "agentjobs_gateway_request_seconds", "Seconds of a request; long polls aside.",
            ["operation"], buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.reviews = Counter(
            "agentjobs_gateway_reviews", "Reviews asked of the API server.", ["kind"],
            registry=self.registry,
        )  # fmt: skip
        self.quota_refusals = Counter(
            "agentjobs_gateway_quota_refusals", "Starts refused by a ResourceQuota (429).",
            registry=self.registry,
        )  # fmt: skip
        self.waiting = Gauge(
            "agentjobs_gateway_waiting", "Long polls that wait for a change.",
            registry=self.registry,
        )  # fmt: skip
        self.known = Gauge(
            "agentjobs_gateway_jobs", "AgentJobs in the cache.", registry=self.registry
        )

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
