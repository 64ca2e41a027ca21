"""Tokens one after the other: prompts, sampling, and the ranks' part in it."""
