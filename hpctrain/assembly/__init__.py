"""What a configuration describes: the names and options of registries, the model and its plan, and images with their files.

`faults` has the rules between values. Nothing here communicates or needs the number of ranks. Read `recipe` first.
"""
