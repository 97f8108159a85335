"""The sharded data-parallel engine: one for every face, and it names none of them."""
