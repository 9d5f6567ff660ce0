"""Triton kernels over stacked clients. Imported only where there is a GPU and Triton.

Conventions: `m` is the number of clients, `b` the samples per client, and client i owns block i of
the first axis. An argument `name_rows` is a pointer to a tensor with one row per client (or
sample); `row` is the stride between the rows of the clients' weights, in elements, since a weight
is a view into the wide matrix `[m, width]` of all parameters. Shapes are given as they lie in
memory, last axis contiguous; "channels last" is a PyTorch tensor `[n, C, H, W]` that lies as `[n,
H, W, C]`. Arguments in capitals are compile-time constants; `B*` are tile sizes.
"""
