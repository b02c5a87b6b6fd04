"""How the service is run: with containers, on Kubernetes, and as a fleet of processes on one machine."""
