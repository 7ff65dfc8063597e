"""Copying with a checksum in C++: `copying.cpp`, compiled by `build.py`, bound by `library.py`."""
