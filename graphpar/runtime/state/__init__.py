"""How the parameters of a rank, their gradients and the optimizer's state are stored: whole, in pieces, or in the memory of the host."""
