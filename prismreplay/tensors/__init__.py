"""Contents of communications: recorded ones, and those that rules make up.

`recording` writes every operation's inputs beside a collected graph, `recorded` reads them,
`rules` and `producing` supply tensors without any recording, `folding` lets one data-parallel
replica stand for all. Importing this package imports no torch; most of its modules do.
"""
