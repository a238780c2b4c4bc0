"""Weight and input gradients from a list of output positions.

dY (N, Cout, P, Q)
 │  draw.py: a score for each position, then a list (index, weight) of n of them,
 │           or the fixed list of FST's Eq. 10, and sums of pairs of dY
 ▼
(dY, X, list) ──► dW      products.py: gather and multiply, on any device
(dY, W, list) ──► dX      fst/ops/cpp: the same in C++, on CPUs
                          strided.py: Eq. 10's list as a larger stride of the library's kernel
 │  sampled.py: the exact gradient, where a sampled one is not faster on this machine;
 ▼              with centring, what the mean of X contributes to dW
dW, dX          fixed.py: Eq. 10
"""
