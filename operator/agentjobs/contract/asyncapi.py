"""The AsyncAPI 3.0 document: the events that an agent runtime receives."""

from typing import Any

from agentjobs import __version__
from agentjobs.api.names import EventType
from agentjobs.contract.events import JobEvent

CONTENT_TYPE = "application/cloudevents+json"


def asyncapi_document() -> dict[str, Any]:
    """The document as a JSON value."""
    schema = JobEvent.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = schema.pop("$defs")
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "agentjobs events",
            "version": __version__,
            "description": "One small signed event tells an agent runtime that a job is over. "
            "CloudEvents 1.0.2 in structured JSON, signed as Standard Webhooks 1.0.0 has it; "
            "delivered at least once, with the same webhook-id on every try.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": {
            "callback": {
                "address": "{callbackUrl}",
                "description": "The callback.url of the start of the job.",
                "parameters": {"callbackUrl": {"description": "URL of the receiver."}},
                "messages": {"jobEvent": {"$ref": "#/components/messages/jobEvent"}},
            }
        },
        "operations": {
            "deliver": {
                "action": "send",
                "channel": {"$ref": "#/channels/callback"},
                "messages": [{"$ref": "#/channels/callback/messages/jobEvent"}],
                "summary": "Any 2xx takes the event; 410 ends its delivery; anything else is tried "
                "again with growing pauses for 72 hours.",
                "bindings": {"http": {"method": "POST", "bindingVersion": "0.3.0"}},
            }
        },
        "components": {
            "messages": {
                "jobEvent": {
                    "name": "jobEvent",
                    "title": "Event about a job",
                    "summary": ", ".join(str(kind) for kind in EventType),
                    "contentType": CONTENT_TYPE,
                    "headers": {
                        "type": "object",
                        "required": ["webhook-id", "webhook-timestamp", "webhook-signature"],
                        "properties": {
                            "webhook-id": {
                                "type": "string",
                                "description": "Id of the event, the same on every try.",
                            },
                            "webhook-timestamp": {
                                "type": "string",
                                "pattern": "^[0-9]+$",
                                "description": "Time of this try, in seconds since 1970.",
                            },
                            "webhook-signature": {
                                "type": "string",
                                "description": "Signatures over id.timestamp.body, blanks between "
                                "them. v1a: Ed25519, by the keys at "
                                "/.well-known/agentjobs-signing-keys; v1: HMAC-SHA256, where "
                                "the platform shares a secret with its receivers.",
                            },
                        },
                    },
                    "payload": {"$ref": "#/components/schemas/JobEvent"},
                }
            },
            "schemas": {**schemas, "JobEvent": schema},
        },
    }
