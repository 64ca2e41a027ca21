"""What a program is for."""

TRAIN, INFER, GENERATE = MODES = ("train", "infer", "generate")
"""Steps of training, a forward of whole inputs, or tokens one after the other."""
SCRIPTS = {TRAIN: "train.py", INFER: "train.py", GENERATE: "generate.py"}
"""The script in an emitted folder that torchrun starts, by mode."""
STEPS = {TRAIN: "a step", INFER: "a batch", GENERATE: "a token"}
"""What a predicted time is of, by mode; with several groups of sequences in flight, a token of each."""
