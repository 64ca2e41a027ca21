"""Processes: torchrun as a child, jobs of verification, command lines of emitted scripts."""
