"""Building blocks of the models, each with its streaming state as an explicit value."""
