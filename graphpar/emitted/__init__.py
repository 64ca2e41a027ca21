"""Modules whose text is copied into emitted programs. They import torch and nothing else."""
