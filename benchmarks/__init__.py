"""Measurements that anyone can repeat: ``python -m benchmarks.NAME`` from the root of the repository."""
