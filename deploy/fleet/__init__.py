"""A fleet on one machine, of real parts: SeaweedFS, Redis with sentinels, servers behind nginx, trainers, Prometheus.

`python -m deploy.fleet` runs it. Tests and benchmarks use the same parts, and kill them.
"""
