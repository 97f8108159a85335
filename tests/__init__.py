"""Tests of the project. Not installed."""
