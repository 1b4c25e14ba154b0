"""From files to a model's parameters: what a model's name means, the file formats, and the loading itself."""
