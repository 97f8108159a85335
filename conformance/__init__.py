"""Run a sharded training wrapper beside an unsharded oracle, record both, and judge.

Importing this package must stay cheap: pytest loads `conformance.pytest_plugin` in every project
of the environment, so nothing here imports torch or a module that does.
"""
