"""What is read and written: checkpoints of any plan, weights in safetensors files, adapters."""
