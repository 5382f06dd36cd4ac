"""A small language model of real text: the library of Python 3.11, its tests and its manual."""
