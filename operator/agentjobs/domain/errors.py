"""Errors of the core."""


class AgentJobError(Exception):
    """Base of all errors of this package."""


class InvalidSpecError(AgentJobError):
    """What was asked for can never be run; the message names the field and what it must be."""
