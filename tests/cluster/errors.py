"""The one error of the cluster tooling."""


class ClusterError(Exception):
    """Something could not be done: what happened, to what, and what to do next."""
