"""What runs inside a rank's process: the process group, its roles, the graph recorder.

The training program sees `torch.distributed` as ever. Each of its communications becomes an
`Op` (`operations`) which the process group (`process_group`) hands to the run's `Role`
(`roles`): take part in a collection, record a real run, and later play a slice or a sandbox.
Importing this package imports no torch; its modules do.
"""
