"""Long tool runs of AI agents as Kubernetes jobs with a handle."""

__version__ = "0.1.0"
