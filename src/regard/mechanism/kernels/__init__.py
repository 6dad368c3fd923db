"""The C++ kernels, and the functions through which layers and decoding call them."""
