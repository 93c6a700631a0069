"""Models: one transformer, one small file per family, checkpoints, tokenizers."""
