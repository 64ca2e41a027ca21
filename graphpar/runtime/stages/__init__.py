"""The stage modules of a rank: built, compiled, and run over microbatches."""
