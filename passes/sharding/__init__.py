"""How tensors lie: the problem, its costs, the search, and the program of one rank."""
