"""The loop of a training script: data, the log, schedules of the learning rate."""
