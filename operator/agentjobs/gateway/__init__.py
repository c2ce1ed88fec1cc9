"""The gateway: the contract over HTTP, stateless, as many replicas as wanted."""
