"""The log of a run, and everything that is derived from it: text, tables, JUnit XML.

Knows findings as lines of a file. Must not know processes, adapters or tensors.
"""
