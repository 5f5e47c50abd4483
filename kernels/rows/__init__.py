"""Operations on rows: norms, activations, quantization, logits."""
