"""The types of values on an emitted script's command line."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Read a whole number of at least 1: the type of an argument."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a whole number of at least 1")
    return int(text)
