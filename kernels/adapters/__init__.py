"""Products with the A and B of LoRA adapters, several adapters in one launch."""
