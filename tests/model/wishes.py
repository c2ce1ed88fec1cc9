"""What users of the model ask for: AgentJobs, rules for their repetition, tools."""

from agentjobs.domain.verdict import OOM_KILLED
from tests.model.apiserver import Json

CALLBACK: Json = {"url": "https://agents.example.net/events"}
TOOLS: Json = {
    "single": {"maxConcurrent": 1},
    "pair": {"maxConcurrent": 2, "retry": {"maxAttempts": 2, "causes": ["oom", "tool_error"]}},
    "steady": {"maxConcurrent": 3, "idempotent": True},
}
PLAIN: tuple[Json, ...] = (
    {"deadlineSeconds": 60, "callback": CALLBACK},
    {"deadlineSeconds": 600, "callback": CALLBACK, "ttlSecondsAfterFinished": 0},
    {"deadlineSeconds": 20},
    {"deadlineSeconds": 90, "pendingDeadlineSeconds": 10, "callback": CALLBACK},
    {"deadlineSeconds": 120, "queueName": "batch", "callback": CALLBACK},
    {"deadlineSeconds": 30, "suspend": True, "callback": CALLBACK},
)
OF_TOOLS: tuple[Json, ...] = (
    {"deadlineSeconds": 300, "toolRef": {"name": "single"}, "callback": CALLBACK},
    {"deadlineSeconds": 400, "toolRef": {"name": "pair"}},
    {"deadlineSeconds": 200, "toolRef": {"name": "steady"}, "queueName": "batch"},
    {"deadlineSeconds": 200, "toolRef": {"name": "single"}, "suspend": True},
    {
        "deadlineSeconds": 300,
        "toolRef": {"name": "single"},
        "dependsOn": [{"name": "index", "condition": "Finished"}],
    },
)
SPECS = (*PLAIN, *OF_TOOLS)
LIMITED, SUSPENDED = len(PLAIN), len(PLAIN) + 3
"""Two that share the only slot of a tool, one of them with a gate before it."""
ONCE: Json = {}
ALL = ["disruption", "oom", "tool_error"]
RETRIES: tuple[Json, ...] = (
    ONCE,
    {"retry": {"maxAttempts": 2, "causes": ALL}},
    {"retry": {"maxAttempts": 3, "causes": ALL}},
    {"retry": {"maxAttempts": 2, "causes": ["disruption"]}},
    {"retry": {"maxAttempts": 3, "causes": ["oom", "tool_error"]}},
    {"retry": {"maxAttempts": 1, "causes": ALL}},
)
EXITS = (
    *((0, "Completed"), (0, "Completed"), (3, "Error"), (137, OOM_KILLED), (143, "Error")),
    (137, "Error"),
)


def wished(spec: int, retry: int) -> Json:
    return SPECS[spec % len(SPECS)] | RETRIES[retry % len(RETRIES)]
