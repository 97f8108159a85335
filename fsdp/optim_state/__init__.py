"""Optimizer states of the wrapper face: saved under the names of the plain model, and loaded."""
