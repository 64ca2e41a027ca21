"""From a model file, or a model and its inputs, to a Program."""
