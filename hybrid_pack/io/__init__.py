"""Files: checkpoints in, packs out."""
