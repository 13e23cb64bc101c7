"""Benchmarks that users run: ``vivace bench …``. Each returns one plain document; none writes files."""
