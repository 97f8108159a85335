"""Tests of the repository itself: what is built, what imports what, what the documents say."""
