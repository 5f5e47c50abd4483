"""Writing folders of weights: sharded states and quantized checkpoints."""
