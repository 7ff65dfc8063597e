"""Native kernels: C++ in `src/`, compiled by `build.py`, and the modules that call it."""
