"""From a captured program to one that can be split and sharded: plain operators, blocks, a loss that is a sum."""
