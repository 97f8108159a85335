"""Model states of the wrapper face: full, local and sharded. See ``form.py`` for the values."""
