"""The adapters of PyTorch's own wrappers, held against plain modules."""
