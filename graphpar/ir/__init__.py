"""The nouns: a traced program, a plan, and what both say of meshes, tensors and source lines."""
