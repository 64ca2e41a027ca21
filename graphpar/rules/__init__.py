"""Operator rules: what each ATen operator does to the types of its tensors on a mesh axis.

    node ──rule of its operator──► Rule "... k, n k -> ... n" ──placements──► every legal way to run it on an axis

One table a family; :func:`graphpar.rules.table.placements` is the entry.
"""
