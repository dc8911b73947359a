"""The whole chain of commands as one: collect, slice, merge, run, and what came of it."""
