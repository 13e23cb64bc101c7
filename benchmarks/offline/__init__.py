"""Everything that the published figures need on a machine without network, in one file: see ``__main__``."""
