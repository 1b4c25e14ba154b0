"""The layers that models are made of. Each parameter knows its place in a checkpoint; none knows a file format."""
