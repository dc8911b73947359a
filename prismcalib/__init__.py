"""Graph and time: from recorded slices to one true timeline."""
