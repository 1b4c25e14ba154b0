"""What notebooks/build.py is made of: series (what there is), stamp (header and setup cell), pair (the two files),
execute, checks, prose, export. Knows nothing of the engine that the notebooks teach."""
