"""What `benchmarks.server_load` is made of: a server of its own, clients, and what is measured."""
