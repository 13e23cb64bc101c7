"""The stages: tensors in, tensors out. They do not import each other."""
