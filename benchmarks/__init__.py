"""Benchmarks that users run from a checkout; those of ``vivace bench`` lie in the package."""
