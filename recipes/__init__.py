"""Recipes: how the models that ship with the project were made."""
