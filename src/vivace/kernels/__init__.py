"""Fast kernels beside their plain definitions."""
