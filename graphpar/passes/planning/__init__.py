"""The search for meshes, schedules, microbatches and stages, and the checks of what a user asks for."""
