"""Writing folders that a model is loaded from: sharded states and quantized checkpoints."""
