"""The demo: two real tool runs as jobs on a real Kubernetes (`python -m demo up`)."""
