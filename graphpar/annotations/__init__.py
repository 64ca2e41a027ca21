"""The user's shard plans: patterns over names, values, files."""
