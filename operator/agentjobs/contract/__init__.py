"""What agents and the gateway say to each other. No Kubernetes in it: clients need it alone."""
