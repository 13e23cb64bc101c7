"""The recipe of the small model that ships inside the package."""
