"""From a captured program to one that can be cut: plain operators, blocks, a loss that is a sum."""
