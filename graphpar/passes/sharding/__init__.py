"""The placement of tensors: the search problem, its prices, the search, and the program of one rank."""
