"""Lists of output positions: drawn by importance, or fixed.

dY (N, Cout, P, Q)
 │  draw.py: a score for each position, then a list (index, weight) of n of them,
 │           or the fixed list of FST's Eq. 10, and sums of pairs of dY;
 │  lists.py: the drawn lists of one backward pass
 ▼
(dY, X, list) ──► dW      fst/ops/backends/lists_torch.py: gather and multiply, on any device
(dY, W, list) ──► dX      fst/ops/backends/lists_cpp.py: the same in C++, on CPUs
                          fst/ops/backends/strided.py: Eq. 10's list as a larger stride
"""
