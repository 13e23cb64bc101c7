"""Fast kernels beside their plain definitions; nothing yet."""
