"""Meshes, schedules, microbatches, stages: what is searched, and what a user asks for."""
