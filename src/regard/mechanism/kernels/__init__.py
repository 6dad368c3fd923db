"""The C++ kernels: loading them, and the functions that layers and decoding call directly."""
