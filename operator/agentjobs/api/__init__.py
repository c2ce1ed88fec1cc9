"""What users write and read: the resources of agentjobs.dev as pydantic models."""
