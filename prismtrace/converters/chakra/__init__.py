"""Chakra execution traces: protobuf frames, and the JSON form of the feeder."""
