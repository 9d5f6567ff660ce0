"""Triton kernels over stacked clients. Imported only where there is a GPU and Triton."""
